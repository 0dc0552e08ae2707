#!/usr/bin/env python3
"""Runs shell commands in a terminal and draws what they print as an SVG.

    python3 tools/terminal_svg.py [--columns N] [--title TEXT] [--type LINE] --output FILE COMMAND [COMMAND ..]

Each command runs in a pseudo-terminal, so its colours and line width are those of a terminal. Lines of `--type` are typed into
the last command, each once it has printed nothing for a second; then its input ends. After `cargo build --release`, this made
docs/terminal.svg, with a GGUF file of SmolLM2-135M-Instruct in the working directory:

    PATH=target/release:$PATH python3 tools/terminal_svg.py --title kiln --columns 96 --output docs/terminal.svg \\
        --type 'What is a cache in a computer?' --type 'Why is the sky blue?' --type /stats \\
        'kiln chat --model SmolLM2-135M-Instruct.Q4_1.gguf --greedy -n 64'

and this made docs/caches.svg:

    PATH=target/release:$PATH python3 tools/terminal_svg.py --title kiln --columns 104 --output docs/caches.svg \\
        'kiln run "ROMEO:" -n 20 --greedy' \\
        'kiln run "ROMEO:" -n 20 --greedy --device wgpu --cache static' \\
        'for c in dynamic sink:window=64 quantized; do kiln run -v -t 0 -n 500 -c $c ROMEO: |& grep cache; done' \\
        'kiln conformance tests/fixtures/transformers-5.23.0 | grep -E "greedy_(static|sliding_long) |passed"'

Needs Python alone. A command that fails ends the program with exit status 1, and no file is written.
"""
import argparse
import fcntl
import html
import itertools
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

CELL = (8.4, 20)  # width and height of a character in pixels
SIZE = 14  # of the font, in pixels
MARGIN = 16
QUIET = 1  # seconds without output after which a line is typed
BAR = 36  # height of the title bar
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
# The frame is drawn in colours of its own, so the picture is the same on a light and on a dark page.
BACKGROUND, TITLE_BAR, BORDER, TEXT, TITLE = "#0d1117", "#161b22", "#484f58", "#e6edf3", "#9198a1"
# ANSI colours 0 to 15: black, red, green, yellow, blue, magenta, cyan, white, and their bright variants.
PALETTE = ("#484f58 #ff7b72 #3fb950 #d29922 #58a6ff #bc8cff #39c5cf #b1bac4 "
           "#6e7681 #ffa198 #56d364 #e3b341 #79c0ff #d2a8ff #56d4dd #ffffff").split()
PLAIN = (TEXT, False, 1.0)  # colour, bold, opacity

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")


def indexed(number):
    """Colour of the 256-colour palette."""
    if number < 16:
        return PALETTE[number]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    steps = (0, 95, 135, 175, 215, 255)
    number -= 16
    return "#" + "".join(f"{steps[number // place % 6]:02x}" for place in (36, 6, 1))


def styled(style, codes):
    """The style after an escape sequence that selects graphics (SGR). Codes that are not drawn are ignored."""
    colour, bold, opacity = style
    codes = iter([int(code or 0) for code in codes.split(";")])
    for code in codes:
        if code == 0:
            colour, bold, opacity = PLAIN
        elif code == 1:
            bold = True
        elif code == 2:
            opacity = 0.7
        elif code == 22:
            bold, opacity = False, 1.0
        elif 30 <= code <= 37 or 90 <= code <= 97:
            colour = PALETTE[code - 30 if code < 90 else code - 82]
        elif code == 39:
            colour = TEXT
        elif code in (38, 48):
            kind = next(codes, 0)
            values = list(itertools.islice(codes, 1 if kind == 5 else 3))
            if code == 38:
                colour = indexed(values[0]) if kind == 5 else "#" + "".join(f"{v:02x}" for v in values)
    return colour, bold, opacity


class Screen:
    """Lines of (character, style), as wide as the terminal, written at a cursor."""

    def __init__(self, columns):
        self.columns, self.lines, self.row, self.column, self.style = columns, [[]], 0, 0, PLAIN

    def write(self, text):
        end = 0
        for escape in ESCAPE.finditer(text):
            self.print(text[end:escape.start()])
            if escape[2]:
                self.control(escape[1], escape[2])
            end = escape.end()
        self.print(text[end:])

    def print(self, text):
        for character in text:
            if character == "\n":
                self.down()
            elif character == "\r":
                self.column = 0
            elif character == "\t":
                self.column = min((self.column // 8 + 1) * 8, self.columns - 1)
            elif character == "\b":
                self.column = max(self.column - 1, 0)
            elif character.isprintable():
                self.put(character)

    def put(self, character):
        if self.column == self.columns:
            self.column = 0
            self.down()
        line = self.lines[self.row]
        line.extend([(" ", PLAIN)] * (self.column + 1 - len(line)))
        line[self.column] = (character, self.style)
        self.column += 1

    def down(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def control(self, values, name):
        first = int(values.split(";")[0]) if values.split(";")[0].isdigit() else 0
        if name == "m":
            self.style = styled(self.style, values)
        elif name == "A":
            self.row = max(self.row - (first or 1), 0)
        elif name == "C":
            self.column = min(self.column + (first or 1), self.columns - 1)
        elif name == "G":
            self.column = max(first - 1, 0)
        elif name == "K" and first == 0:
            del self.lines[self.row][self.column:]
        elif name == "K":
            self.lines[self.row] = []
        elif name == "J":
            del self.lines[self.row][self.column:], self.lines[self.row + 1:]


def run(command, columns, typed=()):
    """What a shell command writes to a terminal of that width while lines are typed into it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        stdin=theirs if typed else subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)})
    os.close(theirs)
    output, keys = b"", [f"{line}\r" for line in typed] + ["\x04"] * bool(typed)
    while True:
        if keys and not select.select([ours], [], [], QUIET)[0]:
            os.write(ours, keys.pop(0).encode())
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux: the other end was closed
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    if process.wait() != 0:
        sys.stderr.buffer.write(output)
        sys.exit(f"error: `{command}` ended with exit status {process.returncode}")
    return output.decode(errors="replace")


def svg(lines, columns, title):
    width = round(columns * CELL[0] + 2 * MARGIN)
    height = BAR + len(lines) * CELL[1] + 2 * MARGIN
    spoken = html.escape("\n".join("".join(c for c, _ in line).rstrip() for line in lines))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="{SIZE}">',
        f"<desc>{spoken}</desc>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{BACKGROUND}" stroke="{BORDER}"/>',
        f'<path d="M1 {BAR}V9a8 8 0 0 1 8-8H{width - 9}a8 8 0 0 1 8 8V{BAR}z" fill="{TITLE_BAR}"/>',
    ]
    for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        parts.append(f'<circle cx="{MARGIN + 6 + 20 * place}" cy="{BAR / 2}" r="6" fill="{colour}"/>')
    parts.append(f'<text x="{width / 2}" y="{BAR / 2 + 5}" text-anchor="middle" fill="{TITLE}">{html.escape(title)}</text>')
    for row, line in enumerate(lines):
        column = 0
        for style, run_of in itertools.groupby(line, key=lambda cell: cell[1]):
            text = "".join(character for character, _ in run_of)
            parts.extend(drawn(text, row, column, style))
            column += len(text)
    return "\n".join(parts) + "\n</svg>\n"


def drawn(text, row, column, style):
    """Words of one style. Each gap of two spaces or more begins a new element, so columns line up in any font."""
    colour, bold, opacity = style
    for words in re.finditer(r"\S+(?: \S+)*", text):
        x = MARGIN + (column + words.start()) * CELL[0]
        y = BAR + MARGIN + row * CELL[1] + SIZE
        weight = ' font-weight="bold"' if bold else ""
        faint = f' opacity="{opacity}"' if opacity < 1 else ""
        yield (f'<text x="{x:.1f}" y="{y}" textLength="{len(words[0]) * CELL[0]:.1f}" lengthAdjust="spacingAndGlyphs" '
               f'fill="{colour}"{weight}{faint}>{html.escape(words[0])}</text>')


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=100, metavar="N", help="width of the terminal (default 100)")
    parser.add_argument("--title", default="", metavar="TEXT", help="in the frame of the window")
    parser.add_argument("--type", action="append", default=[], metavar="LINE", help="typed into the last command; can be repeated")
    parser.add_argument("--output", required=True, metavar="FILE")
    parser.add_argument("commands", nargs="+", metavar="COMMAND", help="one line for bash")
    args = parser.parse_args()
    screen = Screen(args.columns)
    for number, command in enumerate(args.commands):
        if number > 0:
            screen.write("\r\n")
        typed = args.type if command is args.commands[-1] else []
        screen.write(f"\x1b[32m$\x1b[0m \x1b[1m{command}\x1b[0m\r\n" + run(command, args.columns, typed))
        screen.style = PLAIN
    while not screen.lines[-1]:
        screen.lines.pop()
    with open(args.output, "w", encoding="utf-8") as file:
        file.write(svg(screen.lines, args.columns, args.title))


if __name__ == "__main__":
    main()
