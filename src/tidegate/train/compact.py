"""The bfloat16 checkpoint in two fifths of its bytes: int4 codes and scales for experts trained with int4 values.

Run ``python -m tidegate.train.compact pack MODEL FILE`` and ``... unpack FILE MODEL``. MODEL is a Hugging Face folder;
FILE is a safetensors file whose metadata holds the small files of that folder. Unpacking gives back every tensor bit
for bit; packing refuses a model whose experts are not at int4 values.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tidegate.errors import UsageError
from tidegate.train.options import INT4_GROUP

SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
_CODES, _SCALES = ".int4_codes", ".int4_scales"


def compress(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes (uint8, two a byte, the even one low) and bfloat16 scales of a bfloat16 matrix; None if that loses a bit."""
    groups = weight.float().reshape(-1, INT4_GROUP)
    top, bottom = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    scales = (torch.where(top > -bottom, top, bottom) / -8).bfloat16()
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    codes = ((groups * inverse).round().clamp_(-8, 7) + 8).to(torch.uint8).view(-1)
    packed = (codes[0::2] | (codes[1::2] << 4)).view(weight.shape[0], -1)
    scales = scales.view(weight.shape[0], -1)
    return (packed, scales) if torch.equal(expand(packed, scales), weight) else None


def expand(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`compress`."""
    codes = torch.stack([packed & 15, packed >> 4], -1).view(-1, INT4_GROUP).float() - 8
    return (codes * scales.float().view(-1, 1)).bfloat16().add_(0.0).view(packed.shape[0], -1)  # no negative zeros


def pack(model: Path, destination: Path) -> None:
    """Raises UsageError where an expert's weights are no int4 values."""
    result = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if ".experts." not in name:
            result[name] = tensor
            continue
        both = compress(tensor)
        if both is None:
            raise UsageError(f"{model}: {name} is not at int4 values; train with --qat-from-step, or ship bfloat16")
        result[name + _CODES], result[name + _SCALES] = both
    metadata = {name: (model / name).read_text("utf-8") for name in SMALL_FILES if (model / name).exists()}
    save_file(result, destination, metadata={"format": "pt", **metadata})


def unpack(source: Path, model: Path) -> None:
    """Write the Hugging Face folder."""
    model.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source)
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith((_CODES, _SCALES))}
    for name, packed in tensors.items():
        if name.endswith(_CODES):
            base = name.removesuffix(_CODES)
            result[base] = expand(packed, tensors[base + _SCALES])
    save_file(result, model / "model.safetensors", metadata={"format": "pt"})
    with safe_open(source, framework="pt") as opened:
        metadata = opened.metadata()
    for name in SMALL_FILES:
        if name in metadata:
            (model / name).write_text(metadata[name], "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    (pack if arguments.action == "pack" else unpack)(arguments.source, arguments.destination)
    print(json.dumps({"written": str(arguments.destination)}))


if __name__ == "__main__":
    main()
