"""``tidegate info``: what is in a checkpoint or a store, from headers alone."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

from tidegate.checkpoint.base import Checkpoint
from tidegate.checkpoint.inventory import count_parameters, dense_tensors
from tidegate.checkpoint.open import detect, open_checkpoint
from tidegate.checkpoint.store import ExpertStore
from tidegate.cli.arguments import Argument, Flag
from tidegate.cli.progress import Progress
from tidegate.errors import UsageError
from tidegate.model_config import ModelConfig
from tidegate.models.families import model_config, weight_map
from tidegate.units import format_bytes


def command(
    path: Annotated[str, Argument(help="A store, a Hugging Face folder, a GGUF file, or builtin.")],
    as_json: Annotated[bool, Flag("--json", help="Print one JSON object.")] = False,
    verify: Annotated[bool, Flag("--verify", help="Read a whole store and check every checksum.")] = False,
) -> int:
    """Prints kind, family, sizes, formats, context and tokenizer. Without --verify only headers are read."""
    kind, found = detect(path)
    if verify and kind != "store":
        raise UsageError(f"--verify has no effect on {found}: only a store has checksums")
    facts = store_facts(ExpertStore.open(found)) if kind == "store" else source_facts(open_checkpoint(found))
    if verify:
        with Progress(f"verifying {found}") as progress:
            ExpertStore.open(found).verify(progress)
        facts["verified"] = True
    print(json.dumps(facts) if as_json else "\n".join(_lines(facts)))
    return 0


def source_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a source checkpoint holds. ``dtypes`` and ``parts`` are bytes on disk. Raises what a conversion would."""
    config = model_config(checkpoint.config)
    weights = weight_map(checkpoint, config)
    embeddings = _tensors(weights.dense(name) for name in _embedding_names(config))
    dense = _tensors(weights.dense(tensor.name) for tensor in dense_tensors(config)) - embeddings
    experts = set()
    for layer in range(config.num_moe_layers):
        for expert in range(config.moe.num_experts if config.moe else 0):
            parts = vars(weights.expert(layer, expert)).values()
            experts |= _tensors(source for source in parts if source is not None)
    size = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    sizes = {
        "experts": sum(size[name] for name in experts),
        "embeddings": sum(size[name] for name in embeddings),
        "other_dense": sum(size[name] for name in dense),
    }
    dtypes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        dtypes[info.dtype] += info.nbytes
    facts = {"kind": checkpoint.kind, "path": str(checkpoint.path), **_model_facts(config)}
    facts |= {"bytes": sum(size.values()), "parts_bytes": {**sizes, "unused": sum(size.values()) - sum(sizes.values())}}
    return facts | {"formats_bytes": dict(dtypes.most_common()), **_text_facts(checkpoint)}


def store_facts(store: ExpertStore) -> dict[str, Any]:
    """What a store holds."""
    formats: Counter[str] = Counter()
    for entry in store.dense.values():
        formats[str(entry.fmt or "f32")] += entry.nbytes
    for layer in store.manifest.layers:
        both = dict.fromkeys((str(layer.layout.fmt), str(layer.layout.down_fmt)))
        formats["experts " + " + ".join(both)] += layer.num_experts * layer.layout.blob_bytes
    embeddings_bytes = sum(store.dense[name].nbytes for name in _embedding_names(store.config))
    parts = {
        "experts": store.expert_bytes,
        "embeddings": embeddings_bytes,
        "other_dense": store.dense_bytes - embeddings_bytes,
    }
    facts = {"kind": "store", "path": str(store.path), **_model_facts(store.config)}
    facts |= {"bytes": store.dense_bytes + store.expert_bytes, "parts_bytes": parts}
    facts |= {"formats_bytes": dict(formats.most_common()), **_text_facts(store)}
    blobs = sorted({layout.blob_bytes for layout in store.layouts})
    return facts | {"expert_blob_bytes": blobs, "source": store.manifest.source["name"]}


def _model_facts(config: ModelConfig) -> dict[str, Any]:
    total, active = count_parameters(config)
    moe = config.moe
    return {
        "family": config.family,
        "parameters": total,
        "active_parameters": active,
        "layers": config.num_layers,
        "moe_layers": config.num_moe_layers,
        "experts": moe.num_experts if moe else 0,
        "experts_per_token": moe.num_experts_per_tok if moe else 0,
        "hidden_size": config.hidden_size,
        "expert_width": moe.expert_dim if moe else 0,
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
    }


def _text_facts(model: Checkpoint | ExpertStore) -> dict[str, Any]:
    return {"tokenizer": model.tokenizer_kind(), "chat_template": model.chat_template() is not None}


def _tensors(sources: Any) -> set[str]:
    return {part.tensor for source in sources for part in source.parts}


def _embedding_names(config: ModelConfig) -> list[str]:
    return ["embed"] if config.tied_embeddings else ["embed", "head"]


def _lines(facts: dict[str, Any]) -> list[str]:
    total, active = facts["parameters"], facts["active_parameters"]
    model = f"{facts['family']}, {_billions(total)} parameters"
    layers = f"{facts['layers']} layers of width {facts['hidden_size']:,}"
    if facts["experts"]:
        model += f", {_billions(active)} active"
        layers += f"; {facts['moe_layers']} with {facts['experts']} experts of width {facts['expert_width']:,}"
        layers += f", {facts['experts_per_token']} per token"
    tokenizer = facts["tokenizer"] or "none found"
    template = "with chat template" if facts["chat_template"] else "no chat template"
    rows = {
        "kind": {"hf": "Hugging Face folder", "gguf": "GGUF file", "store": "expert store"}[facts["kind"]],
        "model": model,
        "layers": layers,
        "context": f"{facts['context']:,} tokens",
        "tokenizer": f"{tokenizer}, {facts['vocabulary']:,} tokens, {template}",
        "bytes": format_bytes(facts["bytes"])
        + ": "
        + _sizes({name.replace("_", " "): size for name, size in facts["parts_bytes"].items()}),
        "formats": _sizes(facts["formats_bytes"]),
    }
    if blobs := facts.get("expert_blob_bytes"):
        rows["expert"] = f"{' or '.join(format_bytes(size) for size in blobs)} each"
    if "source" in facts:
        rows["source"] = facts["source"]
    if facts.get("verified"):
        rows["checksums"] = "all good"
    return [facts["path"], *(f"  {key:<10} {value}" for key, value in rows.items())]


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
