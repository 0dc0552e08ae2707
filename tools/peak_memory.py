#!/usr/bin/env python3
"""Runs a command and prints the most anonymous memory it held (Linux): what it allocated, without the files it mapped.

    python3 tools/peak_memory.py [--interval SECONDS] COMMAND [ARGUMENT ..]

`/usr/bin/time -v` counts mapped files too, which say nothing about what a program allocates. Memory is sampled
from /proc/PID/status (RssAnon) every few milliseconds, so a shorter peak may be missed. Prints to standard error, and
exits as the command does.
"""
import argparse
import subprocess
import sys
import time


def anonymous(pid):
    """Bytes of anonymous memory of a process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interval", type=float, default=0.002, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("name a command to run")
    try:
        process = subprocess.Popen(args.command)
    except OSError as error:
        sys.exit(f"error: {args.command[0]}: {error.strerror}")
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid) or 0)
        time.sleep(args.interval)
    print(f"peak anonymous memory: {peak / 2**20:.1f} MiB", file=sys.stderr)
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
