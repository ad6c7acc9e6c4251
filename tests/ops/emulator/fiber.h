// A thread of an emulated GPU: a stack of its own that gives way to another and goes on where it was. swapcontext alone would
// do, but it calls into the operating system each time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace emulator {

class Context {
 public:
  // It will begin with enter(arguments...), ints and no pointers, on these bytes; enter must not return.
  template <typename... Arguments>
  void prepare(void* stack, size_t bytes, void (*enter)(Arguments...), Arguments... arguments) {
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack;
    start_.uc_stack.ss_size = bytes;
    makecontext(&start_, reinterpret_cast<void (*)()>(enter), sizeof...(arguments), arguments...);
    begun_ = false;
  }

  // From this one, which runs, to the other; returns when somebody switches back.
  void switch_to(Context& other) {
    if (_setjmp(place_) != 0) return;
    if (other.begun_) _longjmp(other.place_, 1);
    other.begun_ = true;
    setcontext(&other.start_);
  }

 private:
  ucontext_t start_;
  jmp_buf place_;
  bool begun_ = true;
};

}  // namespace emulator
