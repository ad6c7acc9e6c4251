"""Where the matrices of an adapter lie: in the arena, and in a packed file. Knows no torch.

One adapter is one row of parts: module by module in the order given, of each A, B, row gain, bias, those that it has.
A part is a matrix as `punica_core.ops.layout` describes it (A without padding, B with rows padded), starts at a
multiple of ROW_ALIGNMENT elements and is padded to one. So an adapter can move as a whole, or be cut between two parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from punica_core.ops.layout import RECORD_WORDS, Field, row_pitch

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """What lies of one module: A [R, I], B [O, R], and if it has them a row gain [O] and a bias [O]."""

    lora_rank: int
    in_features: int
    out_features: int
    has_gain: bool = False
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of `height` rows of `width` elements, `pitch` apart, the first at element `start` of the layout."""

    start: int
    height: int
    width: int
    pitch: int

    @property
    def size(self) -> int:
        """Elements that it takes, padding behind it included."""
        return row_pitch(self.height * self.pitch)


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """The parts of one module."""

    a: Part
    b: Part
    gain: Part | None = None
    bias: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they lie."""
        return tuple(part for part in (self.a, self.b, self.gain, self.bias) if part is not None)


@dataclass(frozen=True, slots=True)
class AdapterLayout(Generic[K]):
    """places: by module; num_elements: of all parts together."""

    places: Mapping[K, ModulePlace]
    num_elements: int

    @property
    def part_sizes(self) -> list[int]:
        """Elements of each part, in the order in which they lie."""
        return [part.size for place in self.places.values() for part in place.parts]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [source, source + length) of a layout lie from element `start` of the arena on."""

    source: int
    length: int
    start: int


def lay_out(shapes: Mapping[K, ModuleShape]) -> AdapterLayout[K]:
    """Where each module of an adapter lies; keys may be module paths or indices."""
    places: dict[K, ModulePlace] = {}
    end = 0
    for key, shape in shapes.items():
        b_pitch, out = row_pitch(shape.lora_rank), shape.out_features
        a = Part(end, shape.lora_rank, shape.in_features, shape.in_features)
        end += a.size
        b = Part(end, out, shape.lora_rank, b_pitch)
        end += b.size
        gain = Part(end, 1, out, out) if shape.has_gain else None
        end += gain.size if gain else 0
        bias = Part(end, 1, out, out) if shape.has_bias else None
        end += bias.size if bias else 0
        places[key] = ModulePlace(a, b, gain, bias)
    return AdapterLayout(MappingProxyType(places), end)


def record_words(place: ModulePlace, scale: float, runs: Sequence[Run]) -> list[int]:
    """The table record (int64 [RECORD_WORDS]) of a module whose layout lies in `runs`, in order of their sources."""
    words = [0] * RECORD_WORDS
    words[Field.A_OFFSET] = address_of(place.a, runs)
    words[Field.B_OFFSET] = address_of(place.b, runs)
    words[Field.GAIN_OFFSET] = -1 if place.gain is None else address_of(place.gain, runs)
    words[Field.BIAS_OFFSET] = -1 if place.bias is None else address_of(place.bias, runs)
    words[Field.RANK_AND_SCALE] = rank_and_scale(place.a.height, scale)
    return words


def rank_and_scale(lora_rank: int, scale: float) -> int:
    """The word of a record that holds both: lora_rank int32, scale fp32."""
    word: int = struct.unpack("<q", struct.pack("<if", lora_rank, scale))[0]
    return word


def pieces(runs: Iterable[Run], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(first, last + 1, address in the arena) of what `runs` hold of elements [begin, end) of a layout."""
    for run in runs:
        first, last = max(begin, run.source), min(end, run.source + run.length)
        if first < last:
            yield first, last, run.start + first - run.source


def address_of(part: Part, runs: Sequence[Run]) -> int:
    """The element of the arena at which a part of a layout begins that lies in `runs`."""
    for run in runs:
        if run.source <= part.start < run.source + run.length:
            return run.start + part.start - run.source
    raise ValueError(f"the part at element {part.start} lies in none of {len(runs)} runs")
