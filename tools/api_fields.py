#!/usr/bin/env python3
"""Print the fields of the requests of the Python packages of OpenAI, Anthropic and ollama, which `kiln serve` must
honour or refuse by name.

    python tools/api_fields.py > crates/kiln-serve/tests/api-fields.txt

A line each: the endpoint and the field. Needs the packages openai, anthropic and ollama.
"""
import importlib.metadata
import typing

import ollama._types as ollama
from anthropic.types import message_count_tokens_params as count
from anthropic.types import message_create_params as messages
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embeddings
from openai.types.audio import transcription_create_params as transcriptions
from openai.types.audio import translation_create_params as translations
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

versions = [f"{name} {importlib.metadata.version(name)}" for name in ["openai", "anthropic", "ollama"]]
print(f"# {', '.join(versions)}, by tools/api_fields.py")
requests = {
    "chat": [chat.CompletionCreateParamsNonStreaming, chat.CompletionCreateParamsStreaming],
    "completions": [completions.CompletionCreateParamsNonStreaming, completions.CompletionCreateParamsStreaming],
    "embeddings": [embeddings.EmbeddingCreateParams],
    "audio": [transcriptions.TranscriptionCreateParamsNonStreaming, translations.TranslationCreateParams],
    "responses": [responses.ResponseCreateParamsNonStreaming, responses.ResponseCreateParamsStreaming],
    "messages": [
        messages.MessageCreateParamsNonStreaming, messages.MessageCreateParamsStreaming, count.MessageCountTokensParams,
    ],
}
for endpoint, kinds in requests.items():
    for field in sorted({field for kind in kinds for field in typing.get_type_hints(kind)}):
        print(endpoint, field)
models = {
    "ollama-chat": ollama.ChatRequest, "ollama-generate": ollama.GenerateRequest, "ollama-options": ollama.Options,
    "ollama-embed": ollama.EmbedRequest, "ollama-embeddings": ollama.EmbeddingsRequest, "ollama-show": ollama.ShowRequest,
}
for endpoint, model in models.items():
    for field in sorted(model.model_fields):
        print(endpoint, field)
