"""What attention on a GPU reserves, against what FlashInfer's plan of a captured step takes."""

from __future__ import annotations

import pytest

from punica_core.engine.graphs import GraphSizes
from punica_core.model.flashinfer import workspace_bytes

SHAPES = {
    "Llama-2-7B": (32, 32, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B": (64, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "SmolLM2-135M": (9, 3, 64),
    "Gemma-2-9B": (16, 8, 256),
    "Gemma-3-1B": (4, 1, 256),
    "24 heads to one": (48, 2, 128),
    "71 heads to one": (71, 1, 64),
}
"""Query heads, key heads and head dim."""


def planned_bytes(num_heads: int, num_kv_heads: int, head_dim: int, processors: int, seqs: int, rows: int) -> int:
    """Of the partial outputs (fp32, with a sum for each) of a captured launch: FlashInfer plans for the largest number
    of tiles into which so many sequences can divide the rows, or for twice the processors."""
    group = num_heads // num_kv_heads
    longest = (rows - seqs + 1) * group
    tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
    tiles = max(2 * processors // num_kv_heads, -(-rows * group // tile) + seqs - 1)
    return num_heads * tiles * tile * (head_dim + 1) * 4


@pytest.mark.parametrize("processors", [66, 108, 132])
@pytest.mark.parametrize("max_batched_tokens", [256, 8192])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_workspace_holds_the_partial_outputs_of_every_captured_step(
    shape: tuple[int, int, int], max_batched_tokens: int, processors: int
) -> None:
    for max_num_seqs in (1, 8, 100, 256):
        sizes = GraphSizes.of(max_num_seqs, max_batched_tokens)
        largest = sizes.largest
        reserved = workspace_bytes(
            *shape,
            processors,
            max_seqs=max(max_num_seqs, largest.num_decode),
            max_prompt_rows=largest.num_prompt_rows,
            max_prompts=largest.num_prompts,
        )
        steps = sizes.steps()
        lanes = [(step.num_decode, step.num_decode) for step in steps if step.num_decode]
        lanes += [(step.num_prompts, step.num_prompt_rows) for step in steps if step.num_prompts]
        needed = max(planned_bytes(*shape, processors, *lane) for lane in lanes)
        assert needed <= reserved <= 2 * needed + (2 << 20), (max_num_seqs, needed, reserved)
