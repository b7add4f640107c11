#!/usr/bin/env python3
"""Learns which functions a start and the first calls of a gateway run, and writes their order down for the linker.

The binary's code is read from disk in pieces of 64 KiB around each function that is called. As the compiler leaves
them, functions that run lie between many that seldom do, and nearly every piece is in memory. So valgrind runs a
release build through starts and calls, alone and in a fleet, and `order.ld` lets the linker put what ran side by side.

Names are kept without their hashes: an order stays good for later builds, and a name that is gone harms nothing.
"""

import argparse
import bisect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from loads import Rig
from peers import Peer, Running
from processes import HERE, TOLLGATE
from run import isolate

KEPT = HERE.parent / "order.ld"
HEAD = """/* Where code lies in a release build: what a start and the first calls run comes first, what a fleet and TLS run next.
   `build.rs` hands it to the linker, `scripts/order` writes it. Names that are gone harm nothing. */
SECTIONS {
  .text : {
"""
TAIL = """    end_of_order = .;
  }
} INSERT BEFORE .init;
"""
# Where the compiler puts what it takes for unlikely, as the growth of a vector.
UNLIKELY = "unlikely."
# How many of the bytes under a name have to have run for it to be among the first; the rest follow, thinner and thinner.
SHARES = (0.5, 0.25, 0.1, 0.0)
NAME_MAX = 200


class Options:
    rt, nice = False, 0


def functions(binary):
    """Address, size and name of every function, and where the order of the last time ends; 0: there was none."""
    out = subprocess.run(["nm", "-S", "--defined-only", binary], capture_output=True, text=True, check=True).stdout
    rows = [line.split(" ", 3) for line in out.splitlines()]
    end = next((int(r[0], 16) for r in rows if r[-1] == "end_of_order"), 0)
    return sorted((int(r[0], 16), int(r[1], 16), r[3]) for r in rows if len(r) == 4 and r[2] in "tTwW"), end


def pattern(name):
    """A function's name without what the next build changes of it, and without the end of names that fill a page."""
    name = re.sub(r"\.llvm\.\d+$", "", name)
    name = re.sub(r"17h[0-9a-f]{16}E.*$", "17h*", name)
    name = re.sub(r"Cs[0-9A-Za-z]+_", "Cs*_", name) + "*" if name.startswith("_R") else name
    return name if len(name) <= NAME_MAX else name[:NAME_MAX] + "*"


def addresses(profile, binary):
    """Addresses in the binary that callgrind saw run, as they are in the file."""
    names, of, at, seen = {}, "", 0, set()

    def named(word):
        number, name = re.fullmatch(r"\((\d+)\)(?: (.*))?", word).groups()
        return names.setdefault(number, name)

    for line in profile.read_text().splitlines():
        if line.startswith("ob="):
            of = named(line[3:])
        elif line.startswith("cob="):
            named(line[4:])
        elif found := re.match(r"(0x|\+|-|\*)([0-9a-f]*)\s", line):
            how, number = found.groups()
            at = {"0x": lambda: int(number, 16), "+": lambda: at + int(number), "-": lambda: at - int(number), "*": lambda: at}[how]()
            if of == binary:
                seen.add(at)
    return seen


def set_apart(out, all_of_them, end, names, ran):
    """Names that ran although the compiler took them for unlikely: known before, or not where the last order wanted them."""
    before = re.findall(r"\*\(\.text\.(\S+)\)", out.read_text() if out.exists() else "")
    known = {name.removeprefix(UNLIKELY) for name in before if name.startswith(UNLIKELY)}
    wanted = set(before) if end else ()
    return known | {names[i] for i in ran if names[i] in wanted and all_of_them[i][0] >= end}


def run(rig, kind, tls, calls):
    """Starts a gateway under valgrind, asks it, and answers the profile of its process."""
    profiles = Path(rig.certificates).parent / "profiles"
    profiles.mkdir(exist_ok=True)
    valgrind = ["valgrind", "--tool=callgrind", "--dump-instr=yes", f"--callgrind-out-file={profiles}/%p"]
    peer = Peer(f"order-{kind}", [*valgrind, TOLLGATE, "--config", "@CONF@", "serve"], "tollgate.yaml", kind, secs=180)
    running = Running(rig, peer, tls=tls)
    pid = running.proc.popen.pid
    for mode, options in calls:
        rig.load(mode, running, **options)
    running.stop()
    return profiles / str(pid)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", nargs="?", type=Path, default=KEPT, help="where it is written, and the last one is")
    out = ap.parse_args().out
    isolate()
    binary = str(Path(TOLLGATE).resolve())
    rig = Rig(Options())
    try:
        rig.set_mock("size=700,gap=20,chunks=20")
        small, streams = ("closed", dict(conns=2, secs=1)), ("sse", dict(streams=2, ramp_ms=10, limit_secs=20))
        profiles = [run(rig, *which) for which in (
            ("tollgate", False, (small, streams)), ("fleet", False, (small,)), ("tollgate", True, (small,)))]
    finally:
        rig.stop()
    all_of_them, end = functions(binary)
    starts, names = [f[0] for f in all_of_them], [pattern(f[2]) for f in all_of_them]
    bytes_of = Counter()
    for (_, size, _), name in zip(all_of_them, names):
        bytes_of[name] += size
    order, unlikely = {}, set()
    for profile in profiles:
        ran = {bisect.bisect_right(starts, at) - 1 for at in addresses(profile, binary)} - {-1}
        unlikely |= set_apart(out, all_of_them, end, names, ran)
        bytes_ran = Counter()
        for i in ran:
            bytes_ran[names[i]] += all_of_them[i][1]
        for share in SHARES:
            order |= {names[i]: None for i in sorted(ran) if bytes_ran[names[i]] >= share * bytes_of[names[i]] and names[i] not in order}
    lines = (f"    *(.text.{where}{name})\n" for name in order for where in ("", UNLIKELY) if not where or name in unlikely)
    out.write_text(HEAD + "".join(lines) + TAIL)
    print(f"{out}: {len(order)} names, {sum(bytes_of[name] for name in order) >> 10} KiB of {sum(bytes_of.values()) >> 10}")


if __name__ == "__main__":
    sys.exit(main())
