#!/usr/bin/env python3
"""Print the fields of the requests of OpenAI's Python package, which `kiln serve` must honour or refuse by name.

    python tools/api_fields.py > crates/kiln-serve/tests/openai-fields.txt

A line each: the endpoint and the field. Needs the package openai.
"""
import typing

import openai
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embeddings
from openai.types.chat import completion_create_params as chat

print(f"# openai {openai.__version__}, by tools/api_fields.py")
requests = {
    "chat": [chat.CompletionCreateParamsNonStreaming, chat.CompletionCreateParamsStreaming],
    "completions": [completions.CompletionCreateParamsNonStreaming, completions.CompletionCreateParamsStreaming],
    "embeddings": [embeddings.EmbeddingCreateParams],
}
for endpoint, kinds in requests.items():
    for field in sorted({field for kind in kinds for field in typing.get_type_hints(kind)}):
        print(endpoint, field)
