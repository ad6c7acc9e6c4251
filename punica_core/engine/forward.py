"""The base model's forward pass over a packed step.

Compiled, layer by layer: norms, rotary embedding and activation become few kernels. One piece of code serves all layers
of a kind, prompts and decode steps; attention and LoRA are opaque ops in it. So compiling takes seconds, and what was
compiled is kept on disk.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn

from punica_core.engine.step_batch import StepBatch
from punica_core.lora.table_step import LoRAOrder, TableLoRA
from punica_core.lora.vocabulary_step import VocabularyStep
from punica_core.model.attention_op import OpAttention, index_layers
from punica_core.model.blocks import fuse_blocks
from punica_core.model.loader import LoadedModel
from punica_core.model.shapes import decoder_layers_path

MOST_VERSIONS: Final = 64
"""Of the one piece of code that serves all layers. It is compiled anew for each order that adapters are computed in,
captured or not, for one row and for several, for few rows and many: more often than the 8 times that torch allows by
itself, beyond which the start would fail."""


class ModelForward:
    """Calls the model on a step. compiled: its layers through torch.compile, else as transformers wrote them.

    Changes the model: another ModelForward of it must not be `compiled` differently.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: OpAttention,
        lora: TableLoRA | None,
        vocabulary: VocabularyStep | None = None,
        *,
        compiled: bool,
    ) -> None:
        self._loaded = loaded
        self._attention = attention
        self._lora = lora
        self._vocabulary = vocabulary
        index_layers(loaded.model)
        fuse_blocks(loaded.model)
        if compiled:
            compile_layers(loaded.model)

    def __call__(self, batch: StepBatch, order: LoRAOrder, *, with_vocabulary: bool = False) -> Tensor:
        """Logits [n, V] of the batch's `logit_rows`, in the model's dtype. The attention and LoRA of it were begun.

        order: in which layers compute what adapters add.
        with_vocabulary: adapters of the step change embedding or head.
        """
        loaded, lora = self._loaded, self._lora
        if order is not LoRAOrder.NONE:
            assert lora is not None, "the step has adapters and there is nothing to compute them with"
            lora.running = order
            loaded.lora.table_step = lora
        loaded.embedding_lora.step = loaded.head_lora.table_step = self._vocabulary if with_vocabulary else None
        try:
            output = loaded.model(
                input_ids=batch.words.index_select(0, batch.sources)[None],
                # A tensor of its own: compiled code would tell apart where in the tables it lies.
                position_ids=batch.positions[None].long(),
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                paged=self._attention,
            )
        finally:
            loaded.lora.table_step = loaded.embedding_lora.step = loaded.head_lora.table_step = None
        logits: Tensor = output.logits[0]
        return logits


def compile_layers(model: Any, *, backend: str = "inductor") -> None:
    """Compile the decoder layers, and what of the model lies outside of them in many small calls. Lets this process
    compile a piece of code `MOST_VERSIONS` times."""
    import torch._dynamo.config as limits

    limits.recompile_limit = max(limits.recompile_limit, MOST_VERSIONS)
    path = decoder_layers_path(model)
    assert path is not None, "a loaded model has layers"
    body = model.get_submodule(path.rpartition(".")[0])
    for layer in model.get_submodule(path):
        layer.compile(backend=backend, fullgraph=True, dynamic=True)
    for child in body.children():
        if not isinstance(child, nn.ModuleList) and not any(True for _ in child.children()) and _is_small(child):
            child.compile(backend=backend, dynamic=True)


def _is_small(module: nn.Module) -> bool:
    """Norms and rotary embeddings: nothing but vectors."""
    return all(parameter.dim() < 2 for parameter in module.parameters())
