#!/usr/bin/env python3
"""Print the fields of the requests of OpenAI's Python package, which `kiln serve` must honour or refuse by name.

    python tools/api_fields.py > crates/kiln-serve/tests/openai-fields.txt

A line each: the endpoint and the field. Needs the package openai.
"""
import typing

import openai
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

print(f"# openai {openai.__version__}, by tools/api_fields.py")
for endpoint, parameters in [("chat", chat), ("completions", completions)]:
    kinds = [parameters.CompletionCreateParamsNonStreaming, parameters.CompletionCreateParamsStreaming]
    for field in sorted({field for kind in kinds for field in typing.get_type_hints(kind)}):
        print(endpoint, field)
