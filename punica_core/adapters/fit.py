"""Whether an adapter fits a base model, and where each of its parts goes. Knows no torch and no numbers.

Module names are the base's, or differ in what can be told apart for certain: `qkv_proj` for q, k and v (and
`gate_up_proj`) on a base that has them split, the split names on a base that has them fused, a missing outermost
`model.`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from punica_core.adapters.files import CONFIG_NAME
from punica_core.adapters.format import AdapterManifest, LoraModule, TokenRows, samples
from punica_core.adapters.header import TensorEntry, shorten
from punica_core.adapters.shapes import ModelShapes
from punica_core.errors import AdapterInvalid, AdapterMismatch, AdapterTooLarge, AdapterUnsupported

_RESIZED = "the vocabulary was resized, or it is of another base model; serve a base of that vocabulary"


@dataclass(frozen=True, slots=True)
class RowShare:
    """`count` output rows of a tensor from `source` on, applied at row `target` of a linear of the base."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class LoraShare:
    """The part of a LoRA module that a linear of the base takes."""

    module: LoraModule
    rows: RowShare


@dataclass(frozen=True, slots=True)
class BiasShare:
    """The part of a trained bias that a linear of the base takes."""

    entry: TensorEntry
    rows: RowShare


@dataclass(slots=True)
class AdapterFit:
    """Where an adapter's parts go, by the base's names.

    linears, biases: of the head too. saved: matrices that replace the head's or the embedding's. token_rows: the
    same for single rows. base_weights: copies that must equal the base's.
    """

    shapes: ModelShapes
    linears: dict[str, list[LoraShare]] = field(default_factory=dict)
    biases: dict[str, list[BiasShare]] = field(default_factory=dict)
    embedding: LoraModule | None = None
    saved: dict[str, TensorEntry] = field(default_factory=dict)
    token_rows: dict[str, TokenRows] = field(default_factory=dict)
    base_weights: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def needs_base(self) -> str:
        """What it has that cannot be computed without the base's numbers, in words; "" if nothing."""
        loras = [share.module for shares in self.linears.values() for share in shares]
        if any(module.magnitude for module in (*loras, *([self.embedding] if self.embedding else []))):
            return "DoRA"
        if self.biases:
            return "trained biases"
        if self.base_weights:
            return "copies of the base model's weights"
        return "a trained embedding" if self.embedding or self.saved or self.token_rows else ""


def check_against(manifest: AdapterManifest, shapes: Mapping[str, tuple[int, int]], max_lora_rank: int) -> None:
    """Raise what `fit_adapter` raises."""
    fit_adapter(manifest, shapes, max_lora_rank)


def fit_adapter(manifest: AdapterManifest, shapes: Mapping[str, tuple[int, int]], max_lora_rank: int) -> AdapterFit:
    """Give every part of the adapter its place in the base.

    AdapterTooLarge names the module and both ranks; AdapterMismatch gives samples of the names, or both shapes;
    AdapterUnsupported: the base has such a module, but what the adapter does to it is not served.
    """
    fit = AdapterFit(ModelShapes.of(shapes))
    for module in (*manifest.modules.values(), *manifest.embeddings.values()):
        if module.lora_rank > max_lora_rank:
            raise AdapterTooLarge(
                f"rank {module.lora_rank} > max {max_lora_rank} (module {module.path!r}); "
                "serve with a larger --max-lora-rank or train with a smaller r."
            )
    _check_spelled_once(fit.shapes, manifest)
    _fit_saved(fit, manifest)
    _fit_linears(fit, manifest)
    _fit_embedding(fit, manifest)
    _fit_biases(fit, manifest)
    _fit_token_rows(fit, manifest)
    _fit_base_weights(fit, manifest)
    _check_exclusive(fit)
    _check_joint_ranks(fit, max_lora_rank)
    return fit


def _fit_linears(fit: AdapterFit, manifest: AdapterManifest) -> None:
    placed = {path: list(_places(fit.shapes, path, module.out_features)) for path, module in manifest.modules.items()}
    unmatched = [path for path, places in placed.items() if not places]
    if unmatched:
        raise AdapterMismatch(
            f"{len(unmatched)} of {len(placed)} adapted modules are not in the base model: found "
            f"{samples(unmatched)}; expected names like {samples(_likely(unmatched, fit.shapes))}. "
            f"{_other_base(manifest, ', or saved with other names')}"
        )
    for path, module in manifest.modules.items():
        _check_shape(fit.shapes, manifest, module, placed[path])
        for target, rows in placed[path]:
            _check_scale(manifest, module, target)
            fit.linears.setdefault(target, []).append(LoraShare(module, rows))


def _places(shapes: ModelShapes, path: str, out_features: int) -> Iterator[tuple[str, RowShare]]:
    """(linear of the base, rows) that a module of the adapter goes to; nothing if the base has no such module."""
    for name in _spellings(shapes, path):
        if name in shapes:
            yield name, RowShare(0, 0, out_features)
            return
        siblings = shapes.siblings(name)
        if siblings:
            source = 0
            for sibling in siblings:
                width = shapes[sibling][1]
                yield sibling, RowShare(source, 0, width)
                source += width
            return
        share = shapes.share(name)
        if share is not None:
            target, first, _ = share
            yield target, RowShare(0, first, out_features)
            return


def _spellings(shapes: ModelShapes, path: str) -> tuple[str, ...]:
    """The path, and with the base's outermost name before it."""
    outermost = next((name.partition(".")[0] for name in shapes if "." in name), "")
    return (path, f"{outermost}.{path}") if outermost else (path,)


def _other_base(manifest: AdapterManifest, or_else: str = "") -> str:
    """The question, and what its config names as its base: sooner told than found."""
    named = manifest.settings.base_model
    return f"Was it trained on another base model{or_else}?" + (f" {CONFIG_NAME} names {named!r}." if named else "")


def _check_shape(
    shapes: ModelShapes, manifest: AdapterManifest, module: LoraModule, places: Sequence[tuple[str, RowShare]]
) -> None:
    first = places[0][0]
    in_features, out_features = shapes[first][0], sum(shapes[target][1] for target, _ in places)
    share = next((found for name in _spellings(shapes, module.path) if (found := shapes.share(name))), None)
    if share is not None and share[0] == first:
        out_features = share[2]
    if (module.in_features, module.out_features) == (in_features, out_features):
        return
    why = _other_base(manifest)
    if first == shapes.head and module.in_features == in_features:
        why = f"The head has {module.out_features} rows in the adapter and {out_features} in the base: {_RESIZED}."
    raise AdapterMismatch(
        f"{module.path!r} adapts {module.in_features} → {module.out_features} features (lora_A "
        f"{list(module.a.shape)}, lora_B {list(module.b.shape)}), the base model has {in_features} → "
        f"{out_features}. {why}"
    )


def _check_scale(manifest: AdapterManifest, module: LoraModule, target: str) -> None:
    """A module found under a longer name must have the rank and scale that patterns give that name."""
    if not target.endswith(f".{module.path}"):
        return
    settings = manifest.settings
    if (settings.rank_of(target), settings.scale_of(target)) != (module.lora_rank, module.scale):
        raise AdapterMismatch(
            f"{module.path!r} is {target!r} in the base model, for which rank_pattern or alpha_pattern say something "
            "else; save the adapter with the base model's names."
        )


def _fit_saved(fit: AdapterFit, manifest: AdapterManifest) -> None:
    shapes = fit.shapes
    wanted = {}
    if shapes.head is not None:
        wanted[shapes.head] = shapes[shapes.head][::-1]
    if shapes.embedding is not None:
        wanted[shapes.embedding] = shapes.embedding_shape
    for path, entry in manifest.saved.items():
        target = next((name for name in _spellings(shapes, path) if name in wanted), None)
        if target is None:
            raise _unsupported_saved(shapes, path, entry, wanted)
        _check_vocabulary(entry, wanted[target])
        fit.saved[target] = entry
        in_place = not any(path.endswith(name) for name in manifest.settings.modules_to_save)
        if shapes.tied and in_place:  # PEFT loads it into the one matrix that both share
            for other in wanted.keys() - {target}:
                fit.saved.setdefault(other, entry)


def _unsupported_saved(
    shapes: ModelShapes, path: str, entry: TensorEntry, wanted: Collection[str]
) -> AdapterUnsupported:
    """LoRA is for linears only; what else was trained (a norm) can be had without it, or in a base of its own."""
    is_classifier = path.rpartition(".")[2] in ("score", "classifier")
    hint = " of a sequence classifier" if is_classifier else ""
    if next(_places(shapes, path, 0), None) is not None:
        advice = "train without it, or use LoRA for it"
    elif is_classifier:
        advice = "train it for text generation"
    else:
        advice = "train without it, or merge the adapter into the base model (merge_and_unload) and serve that"
    return AdapterUnsupported(
        f"the tensor {shorten(entry.name)!r} is not served: a fully trained weight{hint} (modules_to_save). "
        f"Fully trained modules may be {samples(wanted) if wanted else 'none of this base model'}; {advice}."
    )


def _fit_embedding(fit: AdapterFit, manifest: AdapterManifest) -> None:
    shapes = fit.shapes
    for path, module in manifest.embeddings.items():
        if shapes.embedding is None or shapes.embedding not in _spellings(shapes, path):
            expected = f"expected {shapes.embedding!r}" if shapes.embedding else "the base model has none to adapt"
            raise AdapterMismatch(f"{path!r} has LoRA as an embedding ({shorten(module.a.name)!r}); {expected}.")
        if (module.in_features, module.out_features) != shapes.embedding_shape:
            vocab, width = shapes.embedding_shape
            raise AdapterMismatch(
                f"{path!r} adapts an embedding of {module.in_features} tokens and width {module.out_features}, the "
                f"base model has {vocab} and {width}: {_RESIZED}."
            )
        fit.embedding = module


def _fit_biases(fit: AdapterFit, manifest: AdapterManifest) -> None:
    shapes = fit.shapes
    for path, entry in manifest.biases.items():
        count = entry.shape[0] if len(entry.shape) == 1 else -1
        places = list(_places(shapes, path, count))
        if not places:
            raise AdapterUnsupported(
                f"the bias {shorten(entry.name)!r} is not served: trained biases of linear layers are, such as "
                f"{samples(sorted(shapes.biased)) if shapes.biased else 'none in this base model'}. Train with bias "
                "'lora_only' or 'none', or merge the adapter into the base model (merge_and_unload) and serve that."
            )
        bare = [target for target, _ in places if target not in shapes.biased]
        if bare:
            raise AdapterMismatch(
                f"{shorten(entry.name)!r} is a trained bias, but {bare[0]!r} has no bias in the base model. "
                f"{_other_base(manifest)}"
            )
        share = next((found for name in _spellings(shapes, path) if (found := shapes.share(name))), None)
        partial = share is not None and share[0] == places[0][0]
        expected = share[2] if share is not None and partial else sum(shapes[target][1] for target, _ in places)
        if count != expected:
            raise AdapterMismatch(
                f"{shorten(entry.name)!r} has the shape {list(entry.shape)}, the base model has [{expected}]. "
                f"{_other_base(manifest)}"
            )
        for target, rows in places:
            fit.biases.setdefault(target, []).append(BiasShare(entry, rows))
    kind = manifest.settings.bias
    announced = {"all": shapes.biased, "lora_only": shapes.biased & fit.linears.keys()}.get(kind, frozenset())
    lacking = sorted(announced - fit.biases.keys())
    if lacking:
        raise AdapterInvalid(
            f"bias is {kind!r} in adapter_config.json, but the file has no bias of {samples(lacking)}. Save it with "
            "its biases, or set bias to 'none' if the base model's own are meant."
        )


def _fit_token_rows(fit: AdapterFit, manifest: AdapterManifest) -> None:
    shapes = fit.shapes
    for path, trained in manifest.token_rows.items():
        wanted = [name for name in (shapes.embedding, shapes.head) if name is not None]
        target = next((name for name in _spellings(shapes, path) if name in wanted), None)
        if target is None:
            raise AdapterMismatch(
                f"{shorten(trained.rows.name)!r} has trained rows of {path!r}; expected {samples(wanted)}."
            )
        vocab, width = shapes.embedding_shape if target == shapes.embedding else shapes[target][::-1]
        if trained.rows.shape[1] != width:
            raise AdapterMismatch(
                f"{shorten(trained.rows.name)!r} has the shape {list(trained.rows.shape)}, rows of {target!r} have "
                f"{width} values. {_other_base(manifest)}"
            )
        if max(trained.token_ids) >= vocab:
            raise AdapterMismatch(
                f"trainable_token_indices names token {max(trained.token_ids)}, the base model has {vocab}: {_RESIZED}."
            )
        if target == shapes.head and target in shapes.biased:
            raise AdapterUnsupported(f"trained rows of {target!r} are not served, since it has a bias.")
        fit.token_rows[target] = trained
    if manifest.mirrored and not shapes.tied:
        raise AdapterMismatch(
            f"trainable_token_indices names {samples(manifest.mirrored)}, of which no rows were saved: it was trained "
            "on a base with tied embeddings, and this base has none."
        )
    if shapes.tied and shapes.embedding in fit.token_rows and shapes.head is not None:
        fit.token_rows.setdefault(shapes.head, fit.token_rows[shapes.embedding])


def _fit_base_weights(fit: AdapterFit, manifest: AdapterManifest) -> None:
    shapes = fit.shapes
    for path, entry in manifest.base_weights.items():
        name = next((n for n in _spellings(shapes, path) if n in shapes or n == shapes.embedding), None)
        if name is None:
            raise AdapterUnsupported(
                f"the tensor {shorten(entry.name)!r} is not served (a weight of the base model, which has no "
                f"{path!r}); save the adapter without it."
            )
        _check_vocabulary(entry, shapes.embedding_shape if name == shapes.embedding else shapes[name][::-1])
        fit.base_weights[name] = entry


def _check_vocabulary(entry: TensorEntry, expected: tuple[int, ...]) -> None:
    if entry.shape != expected:
        why = _RESIZED if len(entry.shape) == 2 and entry.shape[1] == expected[1] else "it is of another base model"
        raise AdapterMismatch(
            f"{shorten(entry.name)!r} has the shape {list(entry.shape)}, the base model has {list(expected)}: {why}."
        )


def _check_exclusive(fit: AdapterFit) -> None:
    """No module is adapted in two ways that exclude each other (PEFT cannot build such an adapter either)."""
    adapted = set(fit.linears) | ({fit.shapes.embedding} if fit.embedding else set())
    head = fit.shapes.head
    if head in fit.token_rows and any(share.module.magnitude for share in fit.linears.get(str(head), ())):
        raise AdapterUnsupported(f"DoRA on {head!r}, some rows of which were trained, is not served; use LoRA there.")
    for one, other, what in (
        (adapted, fit.saved, "LoRA and a fully trained weight"),
        (adapted - {head}, fit.token_rows, "LoRA and single trained rows"),
        (set(fit.saved), fit.token_rows, "a fully trained weight and single trained rows"),
    ):
        both = sorted(str(path) for path in one if path in other)
        if both:
            raise AdapterInvalid(f"{both[0]!r} has {what}; it can have one of them.")
    for path, shares in fit.linears.items():
        _check_overlap(path, [(share.rows, share.module.path) for share in shares])
    for path, biases in fit.biases.items():
        _check_overlap(path, [(share.rows, share.entry.name) for share in biases])


def _check_overlap(path: str, shares: Sequence[tuple[RowShare, str]]) -> None:
    end = 0
    for rows, _ in sorted(shares, key=lambda share: share[0].target):
        if rows.target < end:
            raise AdapterInvalid(f"{samples(name for _, name in shares)} change the same rows of {path!r}; keep one.")
        end = rows.target + rows.count


def _check_spelled_once(shapes: ModelShapes, manifest: AdapterManifest) -> None:
    paths = {path for path, _, _ in manifest.account()}
    for path in sorted(paths):
        twins = [name for name in _spellings(shapes, path)[1:] if name in paths]
        if twins:
            raise AdapterInvalid(f"{path!r} and {twins[0]!r} are both {twins[0]!r} in the base model; keep one.")


def _check_joint_ranks(fit: AdapterFit, max_lora_rank: int) -> None:
    for path, shares in fit.linears.items():
        joint = sum(share.module.lora_rank for share in shares)
        if len(shares) > 1 and joint > max_lora_rank:
            raise AdapterTooLarge(
                f"rank {joint} > max {max_lora_rank}: the base has {path!r} for {_listed(shares)}, whose ranks add up; "
                "serve with a larger --max-lora-rank or train with a smaller r."
            )


def _listed(shares: Iterable[LoraShare]) -> str:
    return samples(share.module.path.rpartition(".")[2] for share in shares)


def _likely(unmatched: list[str], shapes: ModelShapes) -> Collection[str]:
    """The base's modules that are called like the first unmatched one; all if none are."""
    leaf = unmatched[0].rsplit(".", 1)[-1]
    return [path for path in shapes if path.rsplit(".", 1)[-1] == leaf] or list(shapes)
