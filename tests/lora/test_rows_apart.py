"""In bfloat16 on a CPU: a NaN of one request's row stays in it, whatever torch's products read beyond their rows.

It shows on CPUs with AMX only, where without what is tested here it does not stay.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from punica_core.lora import linear, segmented, vocabulary
from punica_core.lora.layers import LinearGroup
from punica_core.lora.plan import Segment
from punica_core.lora.segmented import SegmentedLoRA
from punica_core.lora.tables import ModuleWeights
from punica_core.lora.vocabulary import SegmentedEmbedding, SegmentedHead
from punica_core.lora.weights import AdapterWeights, TrainedRows, VocabularyWeights

ROWS, SICK = 40, 17
WIDTHS = (3, 31, 32, 33, 64, 100, 136, 200, 264)
RANKS = (1, 3, 8, 16, 31, 33, 40, 64, 100, 200)
CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def one_sick_row(width: int) -> Tensor:
    """[ROWS, width], of which row SICK is NaN, and so is what lies before and behind."""
    x = torch.full((ROWS + 2, width), float("nan"), dtype=torch.bfloat16)[1:-1]
    x[:SICK], x[SICK + 1 :] = random(SICK, width), random(ROWS - SICK - 1, width)
    return x


def sick_rows(y: Tensor) -> list[int]:
    return y.isnan().any(1).nonzero().flatten().tolist()


def base_products(width: int) -> list[Tensor]:
    x = one_sick_row(width)
    return [linear.linear(x, random(192, width), bias) for bias in (None, random(192))]


def lora_of(width: int, lora_rank: int) -> list[Tensor]:
    """What one adapter adds to a linear alone and to three that are fused, of all rows and of those of a segment."""
    found = []
    for paths in (("o",), ("q", "k", "v")):
        group = LinearGroup(0, paths, width, (64,) * len(paths))
        modules = {path: ModuleWeights(random(lora_rank, width), random(64, lora_rank), 1.0) for path in paths}
        segment = Segment(0, ROWS, AdapterWeights("key", modules, 0))
        step = SegmentedLoRA([group], 1 << 30, CPU).step([segment])
        assert step is not None
        y = torch.zeros(ROWS, 64 * len(paths), dtype=torch.bfloat16)
        step.add(group, one_sick_row(width), y)
        found.append(y)
    return found


def adapter_with(**parts: object) -> list[Segment]:
    return [Segment(0, ROWS, AdapterWeights("key", {}, 0, vocabulary=VocabularyWeights(**parts)))]  # type: ignore[arg-type]


def heads_of_adapters(width: int) -> list[Tensor]:
    trained = TrainedRows(torch.arange(64), random(64, width))
    found = []
    for segments in (adapter_with(head_matrix=random(300, width)), adapter_with(head_rows=trained)):
        y = torch.zeros(ROWS, 300, dtype=torch.bfloat16)
        SegmentedHead(segments, None, None).add(LinearGroup(0, ("lm_head",), width, (300,)), one_sick_row(width), y)
        found.append(y)
    return found


def embedding_of_an_adapter(lora_rank: int) -> list[Tensor]:
    a = random(lora_rank, 50)
    a[:, SICK] = float("nan")
    y = torch.zeros(ROWS, 64, dtype=torch.bfloat16)
    weights = ModuleWeights(a, random(64, lora_rank), 1.0)
    SegmentedEmbedding(adapter_with(embedding=weights)).embed(torch.arange(ROWS), y)
    return [y]


CASES: dict[str, Callable[[], list[Tensor]]] = {
    **{f"base product of width {width}": lambda w=width: base_products(w) for width in WIDTHS},  # type: ignore[misc]
    **{f"shrink of width {width}": lambda w=width: lora_of(w, 16) for width in WIDTHS},  # type: ignore[misc]
    **{f"expand of lora_rank {rank}": lambda r=rank: lora_of(64, r) for rank in RANKS},  # type: ignore[misc]
    **{f"head of width {width}": lambda w=width: heads_of_adapters(w) for width in WIDTHS},  # type: ignore[misc]
    **{f"embedding, lora_rank {rank}": lambda r=rank: embedding_of_an_adapter(r) for rank in RANKS},  # type: ignore[misc]
}


@pytest.mark.parametrize("products", CASES.values(), ids=CASES.keys())
def test_no_row_hears_of_another(products: Callable[[], list[Tensor]]) -> None:
    torch.manual_seed(0)
    for y in products():
        assert sick_rows(y) == [SICK]


READ_BEYOND = ("base product of width 100", "shrink of width 100", "head of width 100", "expand of lora_rank 100")


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX, where it shows")
@pytest.mark.parametrize("case", [*READ_BEYOND, "embedding, lora_rank 100"])
def test_without_room_between_rows_it_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, segmented, vocabulary):
        monkeypatch.setattr(module, "spaced", lambda x: x)
    monkeypatch.setattr(segmented, "is_read_beyond", lambda width: False)
    assert any(sick_rows(y) != [SICK] for y in CASES[case]())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [*WIDTHS, 8, 16, 48])
def test_rows_get_room_where_they_are_read_beyond(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, width).to(dtype)
    got = linear.spaced(x)
    assert torch.equal(got, x)
    moved = dtype == torch.bfloat16 and width not in (8, 16, 32, 64)
    assert got.stride(0) == (-(-width // 32) * 32 if moved else width)
    assert (got is x) != moved


@pytest.mark.parametrize("lora_rank", RANKS)
def test_the_room_changes_no_number(lora_rank: int) -> None:
    torch.manual_seed(0)
    group = LinearGroup(0, ("q", "v"), 64, (48, 32))
    a = {path: random(lora_rank, 64) for path in "qv"}
    b = {"q": random(48, lora_rank), "v": random(32, lora_rank)}
    adapter = AdapterWeights("key", {path: ModuleWeights(a[path], b[path], 0.5) for path in "qv"}, 0)
    x, y = random(ROWS, 64), torch.zeros(ROWS, 80, dtype=torch.bfloat16)
    step = SegmentedLoRA([group], 1 << 30, CPU).step([Segment(0, ROWS, adapter)])
    assert step is not None
    step.add(group, x, y)
    wanted = [0.5 * (x.double() @ a[path].double().T).bfloat16().double() @ b[path].double().T for path in "qv"]
    torch.testing.assert_close(y.double(), torch.cat(wanted, 1), rtol=1e-2, atol=lora_rank**0.5 / 4)
