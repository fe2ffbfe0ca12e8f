"""GGUF files for tests, written with the `gguf` package."""

import gguf
import numpy as np


def write_gguf(path, arch="llama", metadata=(), tensors=(), tokenizer=()):
    """``metadata`` and ``tokenizer`` are dicts of full keys; ``tensors`` maps names to float arrays or to (raw, type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**dict(metadata), **dict(tokenizer)}.items():
        add_value(writer, key, value)
    for name, tensor in dict(tensors).items():
        if isinstance(tensor, tuple):
            raw, kind = tensor
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer, key, value):
    if isinstance(value, np.generic):
        kinds = {"uint16": "add_uint16", "int32": "add_int32", "uint64": "add_uint64", "float64": "add_float64"}
        getattr(writer, kinds[value.dtype.name])(key, value.item())
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantized(values, kind):
    """(raw bytes, type name) of a float matrix in a type that the gguf package can make."""
    raw = gguf.quants.quantize(np.asarray(values, np.float32), gguf.GGMLQuantizationType[kind])
    return raw, kind


def llama_metadata(hidden=64, heads=4, kv_heads=2, layers=1, ff=96, **more):
    base = {
        "llama.block_count": layers,
        "llama.context_length": 128,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": ff,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": hidden // heads,
    }
    return {**base, **more}


def embedding(vocab=16, hidden=64, seed=0):
    return {"token_embd.weight": np.random.default_rng(seed).standard_normal((vocab, hidden)).astype(np.float32)}
