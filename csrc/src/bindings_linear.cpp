// The binding of lora_linear_tile: lora_linear of punica_core/ops/__init__.py, cut as punica_core/ops/linear.py says.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings.h"
#include "maps.h"
#include "punica/linear_params.h"
#include "tables.h"

namespace {

using punica::check_cuda;
using punica::to_int;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_matrix(char const* name, Tensor const& matrix, ScalarType dtype) {
  STD_TORCH_CHECK(matrix.dim() == 2 && matrix.stride(1) == 1 && matrix.size(1) % 8 == 0 && matrix.stride(0) % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(matrix.data_ptr()) % 16 == 0 && matrix.scalar_type() == dtype,
                  name, " must be 2-D of one dtype with contiguous rows that start on 16 bytes, a multiple of 8 wide");
}

punica::LinearTile make_tile(std::vector<int64_t> const& words) {
  STD_TORCH_CHECK(words.size() == 5, "tile must be rows, height, splits, boxes, stages");
  punica::LinearTile const tile{to_int(words[0]), to_int(words[1]), to_int(words[2]), to_int(words[3]), to_int(words[4])};
  bool const splits = tile.splits == 1 || tile.splits == 2 || tile.splits == 4 || tile.splits == 8;
  STD_TORCH_CHECK(splits && tile.height > 0 && tile.height <= punica::kMaxLinearHeight && tile.height % (16 * tile.splits) == 0 &&
                      (tile.boxes == 1 || tile.boxes == 2),
                  "no such tile: height ", tile.height, ", splits ", tile.splits, ", boxes ", tile.boxes);
  return tile;
}

void lora_linear_tile(Tensor y, Tensor v, Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor arena, Tensor table, Tensor plan,
                      std::vector<int64_t> out_features, int64_t max_rank, std::vector<int64_t> tile) {
  torch::stable::accelerator::DeviceGuard const guard(x.get_device_index());
  auto const config = punica::launch_config(x);
  ScalarType const dtype = weight.scalar_type();
  punica::LinearParams params{};
  punica::ShrinkParams& shrink = params.shrink;
  shrink.tables = punica::make_tables(arena, table, plan);
  for (auto const& [name, matrix] : {std::pair{"y", &y}, {"x", &x}, {"weight", &weight}}) check_matrix(name, *matrix, arena.scalar_type());
  STD_TORCH_CHECK(y.size(0) == x.size(0) && y.size(1) == weight.size(0) && x.size(1) == weight.size(1), "y, x and weight do not fit");
  params.tile = make_tile(tile);
  STD_TORCH_CHECK(x.size(0) >= 1 && x.size(0) <= params.tile.rows, "a tile of ", params.tile.rows, " rows for ", x.size(0));
  params.num_rows = to_int(x.size(0));
  params.out_features = to_int(y.size(1));
  params.weight = punica::make_map(weight, punica::kLinearBox, params.tile.height);
  params.x = punica::make_map(x, punica::kLinearBox, params.box_rows());
  params.y = y.data_ptr();
  params.y_stride = y.stride(0);
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->is_contiguous() && bias->size(0) == y.size(1) && bias->scalar_type() == dtype &&
                        reinterpret_cast<uintptr_t>(bias->data_ptr()) % 16 == 0,
                    "bias must be contiguous [O] of weight's dtype");
    params.bias = bias->data_ptr();
  }
  shrink.scratch = punica::make_scratch(v, plan, x.size(0), shrink.tables.slices, max_rank, config.num_sms, true);
  shrink.x = x.data_ptr();
  shrink.x_stride = x.stride(0);
  shrink.in_features = to_int(x.size(1));
  STD_TORCH_CHECK(static_cast<int>(out_features.size()) == shrink.tables.slices, "out_features must name every slice");
  int column = 0;
  for (int slice = 0; slice < shrink.tables.slices; ++slice) {
    params.columns[slice] = column;
    params.widths[slice] = to_int(out_features[slice]);
    column += params.widths[slice];
  }
  STD_TORCH_CHECK(column == y.size(1), "out_features add up to ", column, ", y has ", y.size(1), " columns");
  int const shared_bytes = punica::fit_tile(params, to_int(max_rank));
  STD_TORCH_CHECK(shared_bytes > 0, "no such tile: ", params.stages, " stages of ", params.stage_bytes(), " bytes");
  auto const launch = dtype == ScalarType::BFloat16 ? punica::launch_linear<__nv_bfloat16> : punica::launch_linear<__half>;
  cudaError_t const error = launch(params, shared_bytes, config);
  STD_TORCH_CHECK(error != cudaErrorCooperativeLaunchTooLarge, "punica::lora_linear_tile: ", params.shrink.scratch.num_blocks, " blocks of ",
                  params.tile.height, " columns wait for each other, and this GPU, or the part of it that this process has, does not run as many at once: ",
                  cudaGetErrorString(error), "; compute the layer with torch.mm between lora_shrink and lora_expand");
  check_cuda(error, "lora_linear_tile");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(punica, CUDA, library) { library.impl("lora_linear_tile", TORCH_BOX(&lora_linear_tile)); }
