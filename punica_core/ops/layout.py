"""Memory layouts that the host code, the torch reference and the CUDA kernels share.

Each number here has its twin in ``csrc/include/punica/params.h``.

Arena
    One flat 1-D tensor of the model's dtype. ``A [R, I]`` is row-major without padding. ``B [O, R]`` is row-major with
    its row pitch rounded up to :data:`ROW_ALIGNMENT` elements, so that each row starts on 16 bytes. A full matrix of
    ``segment_gemm`` ``W [O, I]`` is stored like ``B``. Each matrix starts at a multiple of :data:`ROW_ALIGNMENT`
    elements. Padding is never read into a result.

Table
    ``int64 [slices, N, RECORD_WORDS]``: one record a slice and slot, see :class:`Field`. Records are whole, slices and
    slots may lie any number of records apart. Offsets count elements of the arena; a gain or bias offset of -1 means
    that there is none.

Plan
    ``int32 [capacity]``: the metadata of one step, see :class:`Header`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

ROW_ALIGNMENT: Final = 8
RECORD_WORDS: Final = 6
ITEM_WORDS: Final = 4
MAX_SLICES: Final = 4
MAX_RANK: Final = 256

EXPAND_SHARE_BYTES: Final = 64
"""Bytes that one output column of a share moves: of B, and of y read and written."""

SHRINK_CHUNK_SHORT: Final = 16
"""lora_rank columns of a shrink unit of a segment of at most 8 rows."""
SHRINK_CHUNK_TALL: Final = 32
"""lora_rank columns of a shrink unit of any other segment."""


class Field(IntEnum):
    """Words of a table record. The fourth holds two 32-bit halves: lora_rank (int32, low) and scale (fp32, high)."""

    A_OFFSET = 0
    B_OFFSET = 1
    GAIN_OFFSET = 2
    BIAS_OFFSET = 3
    RANK_AND_SCALE = 4


HEADER_WORDS: Final = 16

NUM_COUNTERS: Final = 4096
"""Words at the end of a plan that belong to the kernels: zero between them."""


class Header(IntEnum):
    """Words of a plan's header.

    A work item is four words. Shrink unit: row_start, row_count, slot, rank_start | rank_count << 16.
    Expand share: row_start, row_count, slot, share | shares << 16: a tile that moves more bytes a column has
    more shares of its columns. Blank, at most 64 rows that have no adapter, or one without lora_rank: row_start,
    row_count, slot, 0. Tile, at most 64 rows of one adapter, whatever the other lists cut them into: row_start,
    row_count, slot, 0. Offsets count words from the start of the plan; words that are not named are zero.
    """

    NUM_SEGMENTS = 0
    NUM_ROWS = 1
    INDPTR_OFFSET = 2
    SLOT_OFFSET = 3
    NUM_SHRINK_UNITS = 4
    SHRINK_OFFSET = 5
    NUM_EXPAND_SHARES = 6
    EXPAND_OFFSET = 7
    LEAST_SHARES = 8
    """Of a tile; 0 without tiles."""
    RANK_PITCH = 9
    """The largest lora_rank of the step's adapters, rounded up to ROW_ALIGNMENT: elements between two slices of v."""
    NUM_BLANKS = 10
    BLANK_OFFSET = 11
    NUM_TILES = 12
    TILE_OFFSET = 13


def scratch_elements(max_rows: int, slices: int, max_rank: int) -> int:
    """Floats of scratch ``v`` that serve steps of up to ``max_rows`` rows at full speed.

    A step of few rows splits its sums up to 16 ways to use the whole GPU; from 1024 rows on its rows give enough work.
    Half a split is for the low-rank rows themselves, in 16 bits.
    """
    return (max(16 * min(max_rows, 1024), max_rows) * 2 + max_rows) * slices * max_rank // 2


def row_pitch(width: int) -> int:
    """Elements between two rows of a padded matrix of ``width`` columns."""
    return -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT
