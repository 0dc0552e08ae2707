#!/usr/bin/env python3
"""Record what transformers' Whisper does with long recordings: tests/fixtures/transformers-5.23.0-whisper.

    python tools/whisper_cases.py OUTDIR

A tiny model of random weights, with two languages, two tasks and timestamps, goes over a few seconds of noise in windows of 0.4 s. Cases have `wave`
(16 kHz samples in tensors.safetensors), the arguments of generate() in `kwargs`, and what came out: `tokens` of all segments, and `segments`,
the start and the end of each in seconds. Needs torch, transformers 5.23 and tokenizers.
"""
import json, os, sys

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

TEXT, EOS, SOT, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES, VOCAB = 50, 50, 51, 52, 53, 54, 55, 56, 57, 58, 80
BINS, POSITIONS = 8, 20


def model(seed):
    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=BINS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=POSITIONS, max_target_positions=32, pad_token_id=EOS, bos_token_id=EOS,
        eos_token_id=EOS, decoder_start_token_id=SOT, suppress_tokens=None, begin_suppress_tokens=None, median_filter_width=3,
        attn_implementation="eager")
    torch.manual_seed(seed)
    whisper = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in whisper.named_parameters():
            # So that it matters what is heard, and not when.
            if "embed_positions" in name:
                tensor.mul_(0.1 if "encoder" in name else 1)
            elif tensor.dim() == 2:
                tensor.mul_(24 if "encoder_attn." in name else 8)
            elif "conv" in name:
                tensor.mul_(30 if tensor.dim() == 3 else 3)
    whisper.generation_config = GenerationConfig(
        decoder_start_token_id=SOT, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=EOS, max_length=32, is_multilingual=True,
        no_timestamps_token_id=NO_TIMES, prev_sot_token_id=PREVIOUS, max_initial_timestamp_index=10, return_timestamps=False,
        lang_to_id={"<|en|>": EN, "<|de|>": DE}, task_to_id={"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        suppress_tokens=[3, 7, SOT, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH], begin_suppress_tokens=[5, EOS],
        alignment_heads=[[0, 1], [1, 0], [1, 3]])
    return whisper


def main():
    if len(sys.argv) != 2:
        raise SystemExit("say where to write the folder: python tools/whisper_cases.py OUTDIR")
    out = sys.argv[1]
    name = "whisper_multilingual"
    folder = os.path.join(out, "models", name)
    whisper = model(4)
    whisper.save_pretrained(folder)
    # Words of two letters, with the space before them.
    words = {("\u0120" + chr(97 + i // 26) + chr(97 + i % 26) if i < TEXT else f"<|{i}|>"): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u0120aa"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    extractor = WhisperFeatureExtractor(feature_size=BINS)
    tensors, cases = {}, []

    def wave(label, seconds, seed):
        random = np.random.default_rng(seed)
        time = np.arange(int(16000 * seconds)) / 16000
        sound = 0.3 * np.sin(2 * np.pi * (200 + 900 * np.sin(3 * time)) * time) * (np.sin(9 * time) > -0.3)
        tensors[label] = torch.from_numpy((sound + 0.05 * random.standard_normal(time.shape)).astype(np.float32))
        return label

    def case(label, sound, **kwargs):
        given = extractor(tensors[sound].numpy(), sampling_rate=16000, return_tensors="pt", truncation=False, padding="longest",
                          return_attention_mask=True)
        call = dict(kwargs)
        if "prompt_ids" in call:
            call["prompt_ids"] = torch.tensor(call["prompt_ids"])
        with torch.no_grad():
            made = whisper.generate(given.input_features, attention_mask=given.attention_mask, return_timestamps=True, return_segments=True,
                                    **call)
        segments = made["segments"][0]
        found = {"model": name, "case": label, "wave": sound, "kwargs": kwargs,
                 "tokens": [token for segment in segments for token in segment["tokens"].tolist()],
                 "segments": [[float(segment["start"]), float(segment["end"])] for segment in segments]}
        if kwargs.get("return_token_timestamps"):
            found["token_times"] = [time for segment in segments for time in segment["token_timestamps"].tolist()]
        cases.append(found)
        print(label, len(segments), found["tokens"][:20])

    one, two = wave("noise", 3.1, 1), wave("more", 5.03, 2)
    case("detected", one, task="transcribe")
    case("german", one, language="de")
    case("translated", two, language="en", task="translate")
    case("conditioned", two, language="en", condition_on_prev_tokens=True)
    case("prompted", one, language="en", prompt_ids=[PREVIOUS, 11, 12, 13])
    case("prompted_and_conditioned", two, language="en", prompt_ids=[PREVIOUS, 11, 12, 13], condition_on_prev_tokens=True)
    for logprob in (-1.8, -2.0, -2.1, -2.2, -2.4):
        case(f"unspoken_below_{-logprob}", two, language="de", temperature=0.0, logprob_threshold=logprob, no_speech_threshold=0.001)
    case("long", wave("long", 11.7, 3), language="en", task="transcribe", condition_on_prev_tokens=True)
    case("beams", one, language="en", num_beams=3)
    case("token_times", one, language="en", return_token_timestamps=True)
    save_file(tensors, os.path.join(out, "tensors.safetensors"))
    with open(os.path.join(out, "cases.json"), "w") as file:
        head = json.dumps({"transformers": "5.23.0", "torch": torch.__version__, "variant": {}})
        file.write(head[:-1] + ', "cases": [\n' + ",\n".join(json.dumps(found) for found in cases) + "\n]}\n")


if __name__ == "__main__":
    main()
