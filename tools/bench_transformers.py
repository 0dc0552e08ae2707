#!/usr/bin/env python3
"""Measure prompt and decode speed of a model with Hugging Face Transformers, the way `kiln bench` measures it.

    python tools/bench_transformers.py --model DIR [-p 256] [-n 64] [-r 5] [--threads N] [--dtype float32]
                                       [--depth 0] [--device cpu] [--cache dynamic] [--json FILE]
    python tools/bench_transformers.py --random CONFIG.json [--save DIR] [the same options]
    python tools/bench_transformers.py --random LAYERS,HIDDEN,HEADS,KV_HEADS,INTER,VOCAB [--save DIR] [the same options]

The tests, named as in llama-bench (-p and -n take comma separated lists; 0 skips):

    pp<P>        one forward over P random tokens from an empty cache, logits of the last position only; P / time
    tg<N>        N forwards of one token each from an empty cache, greedy argmax fed back, no generate(); N / time
    tg<N>@<D>    the same behind D tokens, fed before the clock starts (--depth takes a list, too)
    generate<N>  model.generate() from a one-token prompt to exactly N new greedy tokens; N / time

Every test is run once uncounted, then -r times; the table gives mean and sample standard deviation of tokens/s.
Creating or clearing the cache is not timed. Attention is the Transformers default (sdpa where the model has it).
With `--cache static --device cuda`, generate() compiles the forward by itself, as it does for any user.
`--cache offloaded` is DynamicCache(offloading=True), what cache_implementation="offloaded" makes; beside `kiln bench -c offloaded`.
It copies on streams of an accelerator, so it needs one.

--random makes random weights (seed 0) for a config, such as those of tools/shapes, or for a Llama; --save writes it as float32 with save_pretrained, so that
`kiln bench` can load the same folder. Needs torch and transformers >= 5. Bad input: one line on stderr, exit status 2.
"""
import argparse, datetime, inspect, json, os, statistics, sys, time

NAMES = "layers hidden heads kv_heads inter vocab".split()


def fail(message):
    print(f"bench_transformers: error: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def counts(text):
    """A comma separated list of whole numbers >= 0."""
    try: values = [int(part) for part in text.split(",")]
    except ValueError: values = [-1]
    if min(values) < 0: raise argparse.ArgumentTypeError(f"'{text}' is not a list of whole numbers >= 0")
    return values


def positive(text):
    if not text.isdecimal() or int(text) < 1: raise argparse.ArgumentTypeError(f"'{text}' is not a whole number >= 1")
    return int(text)


def arguments():
    ap = Parser(description=__doc__.split("\n\n")[0])
    ap.add_argument("--model", metavar="DIR", help="a Hugging Face model folder")
    ap.add_argument("--random", metavar=",".join(NAMES).upper(), help="random weights for a Llama of this size, or for a config.json, instead of --model")
    ap.add_argument("--save", metavar="DIR", help="with --random: write the model here as float32")
    ap.add_argument("-p", type=counts, default=[256], help="prompt lengths (default 256)")
    ap.add_argument("-n", type=counts, default=[64], help="numbers of generated tokens (default 64)")
    ap.add_argument("--depth", type=counts, default=[0], help="tokens in the cache before tg (default 0)")
    ap.add_argument("-r", type=positive, default=5, help="counted repetitions (default 5)")
    ap.add_argument("--threads", type=positive, help="CPU threads (default: PyTorch's own choice)")
    ap.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    ap.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    ap.add_argument("--cache", choices=["dynamic", "static", "offloaded"], default="dynamic")
    ap.add_argument("--json", metavar="FILE", help="write the results here as well")
    a = ap.parse_args()
    if bool(a.model) == bool(a.random): fail("give either --model DIR or --random " + ",".join(NAMES).upper())
    if a.save and not a.random: fail("--save needs --random")
    if a.model and not os.path.isdir(a.model): fail(f"no such folder: {a.model}")
    if a.model and not os.path.isfile(os.path.join(a.model, "config.json")): fail(f"no config.json in {a.model}")
    if a.save and os.path.exists(a.save) and not os.path.isdir(a.save): fail(f"--save: not a folder: {a.save}")
    folder = os.path.dirname(os.path.abspath(a.json)) if a.json else "."
    if not os.path.isdir(folder): fail(f"--json: no such folder: {folder}")
    return a


def random_model(sizes, context):
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    if sizes.endswith(".json"):
        torch.manual_seed(0)
        try: return AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.load(open(sizes))))
        except (OSError, ValueError, KeyError, TypeError) as e: fail(f"--random: {sizes}: " + " ".join(str(e).split())[:300])
    try: s = dict(zip(NAMES, (int(x) for x in sizes.split(",")), strict=True))
    except ValueError: fail(f"--random: '{sizes}' is not {','.join(NAMES).upper()}")
    if min(s.values()) < 1: fail(f"--random: every number must be >= 1, got '{sizes}'")
    if s["hidden"] % (2 * s["heads"]): fail("--random: HIDDEN must be a multiple of 2 * HEADS")
    if s["heads"] % s["kv_heads"]: fail("--random: HEADS must be a multiple of KV_HEADS")
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=s["layers"], hidden_size=s["hidden"], num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"],
        intermediate_size=s["inter"], vocab_size=s["vocab"], max_position_embeddings=max(4096, context)))


def load(a):
    if a.random:
        model = random_model(a.random, max(a.p + a.n) + max(a.depth) + 1)
        if a.save: model.save_pretrained(a.save)
        return model.to(getattr(torch, a.dtype))
    try:
        if transformers.AutoConfig.from_pretrained(a.model).is_encoder_decoder: fail(f"{a.model} is an encoder-decoder model")
        return transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype), local_files_only=True)
    except (OSError, ValueError, KeyError) as e: fail(f"cannot load {a.model}: " + " ".join(str(e).split())[:300])


class Bench:
    def __init__(self, a, model):
        self.a, self.model, self.config = a, model.to(a.device).eval(), model.config.get_text_config()
        takes = inspect.signature(model.forward).parameters       # Mamba has another name for its cache
        self.cache_argument = "past_key_values" if "past_key_values" in takes else "cache_params"
        if self.cache_argument not in takes: fail(f"{type(model).__name__} takes no cache")
        first = self.config.bos_token_id
        self.first = first if isinstance(first, int) and 0 <= first < self.config.vocab_size else self.config.vocab_size - 1

    def empty_cache(self, length):
        """A function that gives an empty cache: a new dynamic one, or the one static buffer cleared."""
        from transformers import DynamicCache, StaticCache
        if self.a.cache == "dynamic": return lambda: DynamicCache(config=self.config)
        if self.a.cache == "offloaded": return lambda: DynamicCache(config=self.config, offloading=True)
        cache = StaticCache(config=self.config, max_cache_len=length)
        return lambda: (cache.reset(), cache)[1]

    def timed(self, n, prepare, work):
        """tokens/s of each counted repetition of `work(prepare())`, after one that is not counted."""
        sync = torch.cuda.synchronize if self.a.device == "cuda" else lambda: None
        samples = []
        for _ in range(1 + self.a.r):
            x = prepare(); sync()
            start = time.perf_counter()
            work(x); sync()
            samples.append(n / (time.perf_counter() - start))
        return samples[1:]

    def step(self, ids, cache):
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.cache_argument: cache})
        return out.logits[:, -1:].argmax(-1)

    def numbers(self, n):
        return torch.randint(0, self.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(0)).to(self.a.device)

    def prompt(self, n):
        ids = self.numbers(n)
        return self.timed(n, self.empty_cache(n), lambda cache: self.step(ids, cache))

    def decode(self, n, depth=0):
        empty, before = self.empty_cache(depth + n), self.numbers(depth)
        def filled():
            cache = empty()
            return cache, self.step(before, cache) if depth else self.start()
        def work(start):
            cache, ids = start
            for _ in range(n): ids = self.step(ids, cache)
        return self.timed(n, filled, work)

    def generate(self, n):
        kw = dict(do_sample=False, min_new_tokens=n, max_new_tokens=n)
        if self.a.cache != "dynamic": kw["cache_implementation"] = self.a.cache
        def work(ids):
            new = self.model.generate(ids, attention_mask=torch.ones_like(ids), **kw).shape[1] - 1
            if new != n: fail(f"generate() gave {new} tokens instead of {n}")
        return self.timed(n, self.start, work)

    def start(self):
        return torch.tensor([[self.first]], device=self.a.device)

    def results(self):
        tests = [(f"pp{n}", n, self.prompt) for n in self.a.p if n]
        for n in filter(None, self.a.n):
            for d in self.a.depth:
                tests.append((f"tg{n}@{d}" if d else f"tg{n}", n, lambda n, d=d: self.decode(n, d)))
            tests.append((f"generate{n}", n, self.generate))
        for name, n, measure in tests:
            s = measure(n)
            yield dict(test=name, n=n, tokens_per_second=statistics.fmean(s), stddev=statistics.stdev(s) if len(s) > 1 else 0.0, samples=s)


def main(a):
    if a.device == "cuda" and not torch.cuda.is_available(): fail("--device cuda: PyTorch sees no CUDA device")
    if a.cache == "offloaded" and a.device == "cpu":
        fail("--cache offloaded: transformers copies such a cache on streams of an accelerator, and on the CPU there are none; use --device cuda")
    if a.threads: torch.set_num_threads(a.threads)
    transformers.logging.set_verbosity_error()
    model = load(a)
    params = list(model.parameters())          # a tied weight counts once
    count, size = sum(p.numel() for p in params), sum(p.numel() * p.element_size() for p in params)
    name = f"random:{a.random}" if a.random else os.path.basename(os.path.abspath(a.model))
    report = dict(tool="transformers", version=transformers.__version__, torch=torch.__version__,
                  date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), device=a.device,
                  threads=torch.get_num_threads(), dtype=a.dtype, cache=a.cache, attention=model.config._attn_implementation,
                  model=name, params=count, bytes=size, results=[])
    human = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
    print("| model | params | backend | threads | test | t/s |\n| --- | ---: | --- | ---: | ---: | ---: |")
    for r in Bench(a, model).results():
        report["results"].append(r)
        backend = f"transformers {a.device} {a.dtype} {a.cache}"
        print(f"| {name} | {human} | {backend} | {report['threads']} | {r['test']} | {r['tokens_per_second']:.2f} ± {r['stddev']:.2f} |", flush=True)
    if a.json:
        with open(a.json, "w") as f: json.dump(report, f, indent=1)


if __name__ == "__main__":
    args = arguments()                         # before the slow imports, so that bad input is answered at once
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    try: import torch, transformers
    except ImportError as e: fail(f"{e}; install torch and transformers")
    with torch.inference_mode(): main(args)
