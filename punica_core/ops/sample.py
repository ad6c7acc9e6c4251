"""The sampling ops: one token of each row of logits, chosen where the logits are.

Registered like the ops of :mod:`punica_core.ops`: schema and torch reference here, a CUDA kernel in ``csrc``
(``sample*.cuh``). Shape legend: ``B`` rows · ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from punica_core.ops.draw import MAX_VOCAB_SIZE, WEIGHT_BITS, draw, first_argmax, is_greedy
from punica_core.protocol import SamplingParams

ROW: Final = np.dtype([("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f8"), ("point", "<f8"), ("least", "<i8")])
"""How one row is sampled; the twin of ``SampleRow`` in ``csrc/include/punica/sample_params.h``.

temperature: 0 takes the largest logit. top_k: 0 is off. top_p: 1 is off. point: where in the distribution the token
lies, in [0, 1). least: the smallest weight that min_p leaves, 0 is off.
"""

ROW_WORDS: Final = ROW.itemsize // 8

_LIBRARY = torch.library.Library("punica", "FRAGMENT")


def sample_tokens(token_ids: Tensor, finite: Tensor, logits: Tensor, rows: Tensor) -> None:
    """Choose the token of each row: the largest logit, or a draw after temperature, top_k, top_p and min_p.

    **Semantics**: ``token_ids[b] = first_argmax(logits[b])`` for rows of temperature 0, else ``draw`` (see
    :mod:`punica_core.ops.draw`) with the parameters and the point of ``rows[b]``; ``finite[b]`` tells whether the row
    has neither NaN nor +inf (-inf is a logit like others). A row that is not finite gets some id below V.

    A row's token depends on that row alone. Nothing is allocated and the host is not waited for.

    Args:
        token_ids: int64 ``[B]`` (mutated).
        finite: bool ``[B]`` (mutated).
        logits: fp32, bf16 or fp16 ``[B, V]``, rows contiguous, V up to 2**22.
        rows: int64 ``[B, 4]``, records of :data:`ROW`, see :func:`pack_rows`.
    """
    torch.ops.punica.sample_tokens(token_ids, finite, logits, rows)


def greedy_tokens(token_ids: Tensor, finite: Tensor, logits: Tensor) -> None:
    """Choose the largest logit of each row, the lowest id of equal ones: ``sample_tokens`` of temperature 0.

    Args:
        token_ids, finite, logits: as for ``sample_tokens``.
    """
    torch.ops.punica.greedy_tokens(token_ids, finite, logits)


def pack_rows(params: Sequence[SamplingParams]) -> npt.NDArray[np.void]:
    """Records of :data:`ROW` ``[B]``, with point 0; greedy rows have temperature 0 and no filters."""
    greedy = (0.0, 0, 1.0, 0.0, 0)
    return np.array([greedy if is_greedy(p) else _fields(p) for p in params], dtype=ROW)


def _fields(params: SamplingParams) -> tuple[float, int, float, float, int]:
    top_k = min(params.top_k, MAX_VOCAB_SIZE)
    least = int(np.ceil(params.min_p * float(1 << WEIGHT_BITS)))
    return params.temperature, top_k, params.top_p, 0.0, least


def rows_words(records: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Records of :data:`ROW` as the words the op takes: int64 ``[B, 4]``, sharing their memory."""
    return records.view(np.int64).reshape(len(records), ROW_WORDS)


def _sample_reference(token_ids: Tensor, finite: Tensor, logits: Tensor, rows: Tensor) -> None:
    check_sample(token_ids, finite, logits, rows)
    greedy_tokens(token_ids, finite, logits)
    records = rows.cpu().numpy().view(ROW).reshape(-1)
    drawn = np.flatnonzero(records["temperature"] > 0)
    if len(drawn):
        at = torch.from_numpy(drawn).to(logits.device)
        params = [_params(record) for record in records[drawn]]
        points = torch.from_numpy(records["point"][drawn]).to(logits.device)
        token_ids[at] = draw(_finite_scores(logits[at], finite[at]), params, points)


def _params(record: np.void) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=float(record["temperature"]),
        top_k=int(record["top_k"]),
        top_p=float(record["top_p"]),
        min_p=int(record["least"]) / (1 << WEIGHT_BITS),
    )


def _greedy_reference(token_ids: Tensor, finite: Tensor, logits: Tensor) -> None:
    check_greedy(token_ids, finite, logits)
    finite.copy_((logits < torch.inf).all(dim=-1))
    token_ids.copy_(first_argmax(_finite_scores(logits, finite)))


def _finite_scores(logits: Tensor, finite: Tensor) -> Tensor:
    """The logits in fp32, 0 in rows that are not finite."""
    return logits.float().masked_fill(~finite.unsqueeze(-1), 0.0)


def check_greedy(token_ids: Tensor, finite: Tensor, logits: Tensor) -> None:
    torch._check(
        logits.dim() == 2 and logits.stride(1) == 1 and 1 <= logits.size(1) <= MAX_VOCAB_SIZE,
        lambda: (
            f"logits must be [B, 1..{MAX_VOCAB_SIZE}] with contiguous rows, got {tuple(logits.shape)} strides "
            f"{logits.stride()}"
        ),
    )
    torch._check(
        logits.dtype in (torch.float32, torch.bfloat16, torch.float16),
        lambda: f"logits must be float32, bfloat16 or float16, got {logits.dtype}",
    )
    for name, out, dtype in (("token_ids", token_ids, torch.int64), ("finite", finite, torch.bool)):
        torch._check(
            out.dtype == dtype and out.dim() == 1 and out.is_contiguous() and out.size(0) == logits.size(0),
            lambda name=name, out=out, dtype=dtype: (
                f"{name} must be contiguous {dtype} [{logits.size(0)}], got {out.dtype} {tuple(out.shape)}"
            ),
        )


def check_sample(token_ids: Tensor, finite: Tensor, logits: Tensor, rows: Tensor) -> None:
    check_greedy(token_ids, finite, logits)
    torch._check(
        rows.dtype == torch.int64 and rows.is_contiguous() and tuple(rows.shape) == (logits.size(0), ROW_WORDS),
        lambda: f"rows must be contiguous int64 [{logits.size(0)}, {ROW_WORDS}], got {rows.dtype} {tuple(rows.shape)}",
    )


def _register() -> None:
    out = "Tensor(a!) token_ids, Tensor(b!) finite, Tensor logits"
    _LIBRARY.define(f"sample_tokens({out}, Tensor rows) -> ()")
    _LIBRARY.define(f"greedy_tokens({out}) -> ()")
    _LIBRARY.impl("sample_tokens", _sample_reference, "CPU")
    _LIBRARY.impl("greedy_tokens", _greedy_reference, "CPU")
    torch.library.register_fake("punica::sample_tokens", check_sample, lib=_LIBRARY)
    torch.library.register_fake("punica::greedy_tokens", check_greedy, lib=_LIBRARY)


_register()
