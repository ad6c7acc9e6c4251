// What is asked of each GPU of the process once. No torch here.
#pragma once

#include <map>
#include <mutex>

namespace punica {

// A value for each device. `of` may be called by several threads.
template <typename V>
class PerDevice {
 public:
  // `ask` is called when the device's value is first wanted, with the others waiting.
  template <typename Ask>
  V of(int device, Ask ask) {
    std::lock_guard const lock(mutex_);
    auto const found = values_.find(device);
    return found != values_.end() ? found->second : values_.emplace(device, ask()).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<int, V> values_;
};

}  // namespace punica
