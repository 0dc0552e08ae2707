#!/usr/bin/env python3
"""Generate text for each schema of tests/data/json_schemas.json with `kiln run --json-schema`, and validate it.

    python tools/check_schemas.py [--model DIR] [--kiln target/release/kiln] [--device cpu] [-n 200] [--every 1] [--tries 1]
        [--num-beams 1] [--bounded]

Needs the Python package jsonschema. A text that is cut off after -n tokens is drawn again with another seed, up to --tries times; then it is
counted and not validated. With --bounded, the text is generated for a schema that limits strings, arrays and objects where it can, so that a
small model comes to an end, and validated against the schema itself. Exit status 1 if a text is not what its schema accepts, 2 for bad input.
"""
import argparse, json, math, os, subprocess, sys, tempfile


def bounded(schema):
    """The schema, narrowed to short numbers, strings and arrays, and to few properties, where it has no limits of its own."""
    if isinstance(schema, list):
        return [bounded(one) for one in schema]
    if schema is True or schema == {}:
        return {"type": "integer", "minimum": 0, "maximum": 99}
    if not isinstance(schema, dict):
        return schema
    has = set(schema).intersection
    # What is a value, or a name, stays.
    fixed = ("enum", "const", "default", "examples", "required", "pattern", "format", "type", "$ref", "$id", "$schema")
    new = {key: value if key in fixed else bounded(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        new["properties"] = {name: bounded(one) for name, one in schema["properties"].items()}
    kind = schema.get("type")
    limits = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    if isinstance(kind, list) or kind is None and has(limits):
        kinds = [one for one in ("null", "boolean", "integer", "number", "string", "array", "object") if one in (kind or ["integer"])]
        kind = new["type"] = kinds[0]
    if kind is None and "properties" in schema and not has({"allOf", "anyOf", "oneOf", "$ref"}):
        kind = new["type"] = "object"
    if kind in ("integer", "number") and not has({"enum", "const"}):
        # Digits go on for ever otherwise.
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        # In draft 4, true says that the limit itself is excluded.
        above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
        low = max(low, (low if isinstance(above, bool) else above) + (above is not False))
        high = min(high, (high if isinstance(below, bool) else below) - (below is not False))
        if (low, high) == (-math.inf, math.inf):
            low, high = 0, 999
        low = max(low, high - 99) if high < math.inf else low
        high = min(high, low + 99)
        if math.ceil(low) <= math.floor(high):
            new = {key: value for key, value in new.items() if key not in limits - {"multipleOf"}}
            new |= {"type": "integer", "minimum": math.ceil(low), "maximum": math.floor(high)}
    if kind == "string" and not has({"enum", "const", "pattern", "format", "maxLength"}):
        new["maxLength"] = schema.get("minLength", 0) + 12
    if kind == "array" and not has({"enum", "const", "maxItems", "contains"}):
        new["maxItems"] = max(schema.get("minItems", 0), len(schema.get("prefixItems", [])), 1) + 1
    if kind == "object" and not has({"enum", "const", "patternProperties", "propertyNames", "allOf", "anyOf", "oneOf", "$ref", "maxProperties"}):
        others = schema.get("additionalProperties", True)
        missing = set(schema.get("required", [])) - set(schema.get("properties", {}))
        if others is not False and not missing:
            more = {name: bounded(others) for name in "ab" if name not in schema.get("properties", {})}
            new["properties"] = new.get("properties", {}) | more
            new["additionalProperties"] = False
    return new


def generate(schema, number, args):
    """The finished process, with a report on its standard output."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        # Whitespace for ever is allowed, and a small model likes it.
        json.dump(schema if isinstance(schema, bool) else {**schema, "x-guidance": {"whitespace_flexible": False}}, file)
        file.flush()
        for seed in range(args.tries):
            command = [args.kiln, "run", "--device", args.device, "--json", "--json-schema", file.name, "-n", str(args.n), "--seed",
                       str(number + 1000 * seed), "--temperature", "1", "--num-beams", str(args.num_beams), "JSON: "]
            command += ["--model", args.model] if args.model else []
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode or json.loads(done.stdout)["stop_reason"] == "end_of_text":
                break
    return done


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("--model", metavar="DIR", help="a Hugging Face model folder (default the demo model)")
    ap.add_argument("--kiln", default="target/release/kiln", metavar="FILE", help="the binary (default target/release/kiln)")
    ap.add_argument("--device", default="cpu", help="where Kiln runs (default cpu)")
    ap.add_argument("-n", type=int, default=200, help="most tokens (default 200)")
    ap.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth schema (default 1)")
    ap.add_argument("--tries", type=int, default=1, metavar="N", help="seeds, as long as texts are cut off (default 1)")
    ap.add_argument("--num-beams", type=int, default=1, metavar="N")
    ap.add_argument("--bounded", action="store_true", help="limit strings and arrays that have no limit")
    args = ap.parse_args()
    try:
        import jsonschema
    except ImportError as e:
        print(f"check_schemas: error: {e}; install jsonschema", file=sys.stderr)
        return 2
    data = os.path.join(os.path.dirname(__file__), "../tests/data/json_schemas.json")
    schemas = json.load(open(data))[::args.every]
    valid = cut = wrong = 0
    for i, entry in enumerate(schemas):
        schema = entry["schema"]
        for wanted in ([bounded(schema)] if args.bounded else []) + [schema]:
            done = generate(wanted, i, args)
            # A limit may contradict what stands elsewhere in the schema.
            if done.returncode == 0:
                break
        if done.returncode:
            wrong += 1
            print(f"{entry['name']}: {done.stderr.strip()}")
            continue
        report = json.loads(done.stdout)
        if report["stop_reason"] != "end_of_text":
            cut += 1
            print(f"{entry['name']}: cut off")
            continue
        try:
            jsonschema.validate(json.loads(report["text"]), schema)
            valid += 1
        except (ValueError, jsonschema.ValidationError) as e:
            wrong += 1
            print(f"{entry['name']}: {report['text']!r}: {str(e).splitlines()[0]}")
    print(f"{valid} valid, {cut} cut off, {wrong} wrong of {len(schemas)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
