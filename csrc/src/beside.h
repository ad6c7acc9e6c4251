// A kernel beside the one after it, in a captured CUDA graph: shrink need not be over when the base product begins, only when
// expand does. No torch here.
//
// Two streams would say the same, but the join of two branches costs what the overlap gives. Here the graph stays one chain:
// the edge behind shrink is a programmatic one, which is passed when all its blocks have called start_next(), and expand gets
// a second, full edge from shrink. Outside of a capture nothing changes and kernels run one after another.
#pragma once

#include <algorithm>
#include <vector>

#include <cuda_runtime_api.h>

namespace punica {

// What a capturing stream's next node waits for.
struct CaptureState {
  bool active = false;
  unsigned long long id = 0;
  std::vector<cudaGraphNode_t> nodes;
  std::vector<cudaGraphEdgeData> edges;
};

inline cudaError_t capture_state(cudaStream_t stream, CaptureState& state) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraphNode_t const* nodes = nullptr;
  cudaGraphEdgeData const* edges = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  cudaError_t const error = cudaStreamGetCaptureInfo(stream, &status, &state.id, nullptr, &nodes, &edges, &count);
#else
  cudaError_t const error = cudaStreamGetCaptureInfo_v3(stream, &status, &state.id, nullptr, &nodes, &edges, &count);
#endif
  state.active = error == cudaSuccess && status == cudaStreamCaptureStatusActive;
  if (!state.active) return error;
  state.nodes.assign(nodes, nodes + count);
  state.edges.assign(count, cudaGraphEdgeData{});
  if (edges != nullptr) state.edges.assign(edges, edges + count);
  return error;
}

inline cudaError_t set_dependencies(cudaStream_t stream, CaptureState& state) {
#if CUDART_VERSION >= 13000
  return cudaStreamUpdateCaptureDependencies(stream, state.nodes.data(), state.edges.data(), state.nodes.size(),
                                             cudaStreamSetCaptureDependencies);
#else
  return cudaStreamUpdateCaptureDependencies_v2(stream, state.nodes.data(), state.edges.data(), state.nodes.size(),
                                                cudaStreamSetCaptureDependencies);
#endif
}

// Kernels of one capture that nothing waits for yet.
class Beside {
 public:
  // The kernel launched last on `stream` calls start_next() once it has waited: let the next one begin then.
  cudaError_t release(cudaStream_t stream) {
    CaptureState state;
    cudaError_t const error = capture_state(stream, state);
    if (error != cudaSuccess || !state.active) return error;
    if (state.id != capture_) pending_.clear();
    capture_ = state.id;
    pending_.insert(pending_.end(), state.nodes.begin(), state.nodes.end());
    for (cudaGraphEdgeData& edge : state.edges) {
      edge = {};
      edge.from_port = cudaGraphKernelNodePortProgrammatic;
      edge.type = cudaGraphDependencyTypeProgrammatic;
    }
    return set_dependencies(stream, state);
  }

  // Let the next kernel on `stream` wait for the end of all of them. `joined`: whether there were any.
  cudaError_t join(cudaStream_t stream, bool& joined) {
    joined = false;
    if (pending_.empty()) return cudaSuccess;
    CaptureState state;
    cudaError_t const error = capture_state(stream, state);
    if (error != cudaSuccess) return error;
    std::vector<cudaGraphNode_t> const waiting = std::move(pending_);
    pending_.clear();
    if (!state.active || state.id != capture_) return cudaSuccess;
    for (cudaGraphNode_t const node : waiting) {
      auto const known = std::find(state.nodes.begin(), state.nodes.end(), node);
      if (known != state.nodes.end()) {
        state.edges[known - state.nodes.begin()] = {};
      } else {
        state.nodes.push_back(node);
        state.edges.push_back({});
      }
    }
    joined = true;
    return set_dependencies(stream, state);
  }

 private:
  unsigned long long capture_ = 0;
  std::vector<cudaGraphNode_t> pending_;
};

// Of the thread that captures.
inline Beside& beside() {
  static thread_local Beside instance;
  return instance;
}

}  // namespace punica
