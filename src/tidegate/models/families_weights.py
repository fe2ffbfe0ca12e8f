"""Where every weight of a model is in a checkpoint: the part that is the same for all naming schemes.

families_hf.py and families_gguf.py know the names. H heads, E experts, F expert width, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from operator import attrgetter

from tidegate.checkpoint.base import Checkpoint
from tidegate.checkpoint.inventory import dense_tensors
from tidegate.checkpoint.sources import ExpertSources, Part, Source
from tidegate.errors import BadTensor
from tidegate.model_config import ModelConfig

Wanted = tuple[str, tuple[int, ...]]  # name and shape of a whole tensor of the checkpoint


class FamilyWeights(ABC):
    """A WeightMap (checkpoint/sources.py) that can also say which tensors, of which shapes, the checkpoint must have."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.shapes = {tensor.name: tensor.shape for tensor in dense_tensors(config)}
        self._decoder_layers = [layer for layer, is_moe in enumerate(config.moe_layers) if is_moe]
        self._dtypes: set[str] = set()  # of the tensors that were checked

    @abstractmethod
    def whole_tensors(self, name: str) -> list[Wanted]:
        """The checkpoint tensors that, stacked by rows, make the dense tensor ``name`` (k_up, v_up: that hold it)."""

    @abstractmethod
    def layer_experts(self, decoder_layer: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that hold the experts of a decoder layer."""

    @abstractmethod
    def expert_of(self, decoder_layer: int, expert: int) -> ExpertSources:
        """The sources of one routed expert."""

    @abstractmethod
    def is_ignored(self, tensor: str) -> bool:
        """A tensor that the checkpoint may have besides, because it does not change the answer."""

    def expert(self, layer: int, expert: int) -> ExpertSources:
        """As in WeightMap: ``layer`` counts MoE layers."""
        return self.expert_of(self._decoder_layers[layer], expert)

    def dense(self, name: str) -> Source:
        """As in WeightMap."""
        tensors = [tensor for tensor, _ in self.whole_tensors(name)]
        suffix = name.rpartition(".")[2]
        if suffix == "k_up":
            return self._nope_rows(tensors[0])
        if suffix == "v_up":
            return self._value_rows(tensors[0])
        return Source.of(*tensors)

    def are_alike(self, layer: int) -> bool:
        """Whether the experts of a MoE layer differ in nothing but their place: stacked, or all tensors of one type.
        Call it after ``check``."""
        assert self.config.moe is not None
        if len(self._dtypes) == 1:
            return True
        experts = self.layer_experts(self._decoder_layers[layer])
        names = [name for name, shape in experts.items() if len(shape) > 1]
        return len(names) < self.config.moe.num_experts or len({self.checkpoint.tensors[n].dtype for n in names}) == 1

    def check(self) -> None:
        """Every tensor the model needs is there with its shape, and none is left over that would change the answer.
        Raises BadTensor naming file, tensor, wanted and got."""
        wanted, tensors = self.wanted, self.checkpoint.tensors
        shapes = list(map(attrgetter("shape"), tensors.values()))
        if len(wanted) == len(tensors) and list(map(wanted.get, tensors)) == shapes:  # nearly always, and sooner seen
            self._dtypes = set(map(attrgetter("dtype"), tensors.values()))
            return
        for name, shape in wanted.items():
            info = tensors.get(name)
            if info is None:
                raise BadTensor(f"{self.checkpoint.path}: tensor {name} is missing, wanted {list(shape)}")
            if info.shape != shape:
                raise BadTensor(f"{info.path}: {name}: wanted shape {list(shape)}, got {list(info.shape)}")
            self._dtypes.add(info.dtype)
        for name, info in tensors.items():
            if name not in wanted and not self.is_ignored(name):
                family = self.config.family
                raise BadTensor(
                    f"{info.path}: {name} {list(info.shape)} is no part of a {family} model with this config"
                )

    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the q, k and v projections."""
        att = self.config.attention
        return (
            att.num_heads * att.head_dim,
            att.num_kv_heads * att.head_dim,
            att.num_kv_heads * att.v_head_dim,
        )

    def kv_b_shape(self) -> tuple[int, int]:
        att = self.config.attention
        return att.num_heads * (att.qk_nope_dim + att.v_head_dim), att.kv_lora_rank

    def stacked(self, gate_up: str, down: str, expert: int) -> ExpertSources:
        """One of the experts stacked in [E, 2F, D] (gate above up) and [E, D, F]."""
        assert self.config.moe is not None
        f = self.config.moe.expert_dim
        return ExpertSources(
            gate=Source.of(Part(gate_up, index=expert, rows=(0, f, 1))),
            up=Source.of(Part(gate_up, index=expert, rows=(f, 2 * f, 1))),
            down=Source.of(Part(down, index=expert)),
        )

    @cached_property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model needs, and its shape: dense ones first, then layer by layer the experts'."""
        out = dict(wanted for name in self.shapes for wanted in self.whole_tensors(name))
        for layer in self._decoder_layers:
            out.update(self.layer_experts(layer))
        return out

    def _nope_rows(self, kv_b: str) -> Source:
        """Heads of kv_b are [nope | v] rows; k_up takes each head's nope rows, transposed."""
        nope = self.config.attention.qk_nope_dim
        return Source.of(*(Part(kv_b, rows=(s, s + nope, 1), transpose=True) for s in self._head_starts()))

    def _value_rows(self, kv_b: str) -> Source:
        att = self.config.attention
        spans = [(s + att.qk_nope_dim, s + att.qk_nope_dim + att.v_head_dim, 1) for s in self._head_starts()]
        return Source.of(*(Part(kv_b, rows=span) for span in spans))

    def _head_starts(self) -> list[int]:
        att = self.config.attention
        return [head * (att.qk_nope_dim + att.v_head_dim) for head in range(att.num_heads)]
