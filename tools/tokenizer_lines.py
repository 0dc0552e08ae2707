#!/usr/bin/env python3
"""Texts to compare tokenizers on: many scripts, code, numbers, emoji, white space, control characters, and special tokens by name.

    python tools/tokenizer_lines.py [COUNT] > LINES      writes COUNT texts (1000), one JSON string a line

The texts are the same each time. Some are in no normal form of Unicode, some have characters that no language uses. Needs Python alone.
"""
import json, random, sys

WORDS = {
    "latin": "the of language model isn't I'VE we'Ll don't naïve café Straße œuvre İstanbul ŁÓDŹ ſalt ﬁne Dvořák señor",
    "greek": "ελληνικά ΛΟΓΟΣ φιλοσοφία ἀρχή",
    "cyrillic": "нещо на Български Привет мир ЁЛКА їжак",
    "hebrew": "שלום עולם שָׁלוֹם",
    "arabic": "مرحبا بالعالم اَلْعَرَبِيَّةُ ۱۲۳ ٤٥٦",
    "devanagari": "नमस्ते दुनिया हिन्दी १२३",
    "bengali": "বাংলা ভাষা কি",
    "tamil": "தமிழ் மொழி",
    "thai": "สวัสดีชาวโลก ภาษาไทย ๑๒๓",
    "khmer": "កាន់តែពិសេសអាច",
    "georgian": "ქართული ᲥᲐᲠᲗᲣᲚᲘ",
    "armenian": "Հայերեն լեզու",
    "amharic": "ሰላም ልዑል",
    "chinese": "我想在apple工作1314151天～ 你好，世界！ 漢字 𠀀𠮷",
    "japanese": "こんにちは世界。カタカナ ﾊﾝｶｸ 「引用」 ゔ が",
    "korean": "안녕하세요 세계 한국어 각 ㄱㄴㄷ",
    "decomposed": "cafe\u0301 re\u0301sume\u0301 A\u030a 가 ｶﾞ \u1e9b\u0323 o\u0308\u0304",
    "emoji": "🚀 😶‍🌫️ 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ✅ 🦙🦙 ☺️ 1️⃣",
    "symbols": "€ £ ∑ ∞ ≠ → ½ ² ③ Ⅷ № ™ § ¿ ¡ … — – “q” ‘q’ «q» ＋ ￥",
    "numbers": "3 33 333 3333 33333 3.3 3..3 1,234,567.89 -1e-9 0xFF 1st 2nd ٣٣ ৩৩ Ⅻ",
    "code": "def f(x): return x**2 fn main() { let v = vec![1u8; 10]; } if (a && !b) {} #include <stdio.h> x->y::z a_b camelCase HTTPServer2 "
            "// /* */ <div class=\"a\"> SELECT * FROM t; $PATH ${x} \\n \\t @decorator ~/.bashrc C++ C# a!=b `q` ```` ''' \"\"\" ------======",
    "special": "<s> </s> <unk> <|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <bos> <|user|> [INST] <0x0A> [PAD1] <|> ▁ ▁a Ġ",
}
SPACES = [" ", "  ", "   ", "     ", " " * 17, " " * 40, "\t", "\t\t", " \t ", "\n", "\n\n", "\n\n\n", " \n", "\n ", "\r\n", "\r", "\r\n\r\n", "\n \n",
          "\u00a0", "\u2003", "\u3000", "\u200b", "\u2028", "\u0085", "\u000b", "\u000c", "\ufeff"]
CONTROL = [chr(code) for code in list(range(32)) + list(range(127, 160)) + [0xad, 0x200d, 0x200e, 0x202e, 0xfffd, 0xfffe, 0xffff, 0x10ffff]]


def text(random, words, scripts):
    kind = random.randrange(10)
    if kind == 0:
        return random.choice(SPACES) * random.randint(1, 4)
    if kind == 1:
        # Any characters but surrogates.
        codes = [random.choice([random.randrange(0x20, 0x7f), random.randrange(0xd800), random.randrange(0xe000, 0x110000)]) for _ in range(12)]
        return "".join(map(chr, codes))
    one = random.choice(scripts) if kind < 6 else None
    parts = []
    for _ in range(random.randint(1, 14)):
        parts.append(random.choice(words[one or random.choice(scripts)]))
        parts.append(" " if random.random() < 0.7 else random.choice(SPACES + CONTROL + ["", "", ".", ",", "?!", "..."]))
    if random.random() < 0.5:
        parts.pop()
    if random.random() < 0.2:
        parts.insert(0, random.choice(SPACES))
    return "".join(parts)


def main(count=1000):
    seeded, words = random.Random(20240501), {script: text.split(" ") for script, text in WORDS.items()}
    fixed = ["", "a", " a", "a ", "\n", " "] + list(WORDS.values()) + ["x" + run + "y" for run in SPACES] + ["a" + letter + "b" for letter in CONTROL]
    lines = fixed + [text(seeded, words, sorted(words)) for _ in range(max(0, count - len(fixed)))]
    for line in lines[:count]:
        print(json.dumps(line))


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:2]))
    except ValueError:
        print("tokenizer_lines: error: the number of texts must be an integer", file=sys.stderr)
        raise SystemExit(2)
