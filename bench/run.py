#!/usr/bin/env python3
"""Measures gateways side by side in front of one mock upstream, over loopback. Never asserts.

Everything is bounded in count and time. The proxies share one core, the mock and the load generator
another. Peers stay up together and take turns within each round, so that other work on the machine hits
all of them. Ratios to bare Pingora, taken within a round, are what to read; absolute times are the
machine's. `scripts/bench` builds what this needs.
"""

import argparse
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import time

from loads import Rig
from measures import MEASURES, ROUNDS
from peers import Running, further, peers
from processes import HERE
from tables import conditions, keep_in_docs, report


def isolate():
    """Starts over in a network namespace with nothing but loopback, where that can be had."""
    if os.geteuid() == 0 and not os.environ.get("BENCH_ISOLATED") and shutil.which("unshare") and shutil.which("ip"):
        os.environ["BENCH_ISOLATED"] = "1"
        inner = 'ip link set lo up && exec "$@"'
        os.execvp("unshare", ["unshare", "-n", "sh", "-c", inner, "sh", sys.executable, *sys.argv])


def options():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--quick", action="store_true", help="two short rounds")
    ap.add_argument("--only", default=",".join(MEASURES), help=f"comma list of: {', '.join(MEASURES)}")
    ap.add_argument("--peers", default="", help=f"further peers, comma list of: {', '.join(further())}")
    ap.add_argument("--without", default="", help="comma list of what is left out: direct, floor, nginx, haproxy, tollgate, tollgate-fleet")
    ap.add_argument("--also", action="append", default=[], help="NAME=BINARY: another build of tollgate, for before and after")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--nice", type=int, default=0, help="niceness of proxies, mock and load")
    ap.add_argument("--rt", action="store_true", help="real-time scheduling: tails that mean something on a busy machine; only for rate, stream, failover")
    ap.add_argument("--keep", action="store_true", help="write the tables into docs/performance.md")
    args = ap.parse_args()
    args.secs, args.chunks, args.open_streams, args.tries, args.turns = 3, 100, 1000, 12, 5
    args.grow_routes, args.grow_keys, args.grow_holds, args.far_tries = 1_000, 1_000_000, 10_000, 100
    if args.quick:
        args.rounds = min(args.rounds, 2)
        args.secs, args.chunks, args.open_streams, args.tries, args.turns = 1, 50, 300, 3, 2
        args.grow_keys, args.grow_holds, args.far_tries = 10_000, 1_000, 20
    unknown = set(args.only.split(",")) - set(MEASURES)
    if unknown:
        ap.error(f"no such measure: {', '.join(sorted(unknown))}")
    return args


def main():
    args = options()
    isolate()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200_000, limit),) * 2)
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    rig, live = Rig(args), []
    try:
        for p in peers(args):
            try:
                live.append(Running(rig, p))
            except (RuntimeError, OSError) as e:
                print(f"left out: {e}", flush=True)
        for measure in args.only.split(","):
            for rig.round in range(min(args.rounds, ROUNDS.get(measure, args.rounds))):
                turn = rig.round % max(1, len(live))
                for r in live[turn:] + live[:turn]:
                    try:
                        MEASURES[measure](rig, r)
                    except (RuntimeError, OSError, subprocess.TimeoutExpired, ValueError, KeyError, sqlite3.Error) as e:
                        print(f"  [{rig.round}] {measure} {r.peer.name} FAILED: {e}", flush=True)
                        rig.samples.append(dict(peer=r.peer.name, measure=measure + ".failed", round=rig.round, why=str(e)[:300]))
    finally:
        for r in live:
            r.stop()
        rig.stop()
    samples = [s for s in rig.samples if not s["measure"].endswith(".failed")]
    told = conditions(samples, began, os.environ.get("BENCH_BUILD", "a build of its own"))
    out = HERE / "results" / f"{began.replace(' UTC', '').replace(' ', 'T').replace(':', '')}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(dict(conditions=told, args=vars(args), samples=rig.samples), indent=1))
    tables = report(samples, [also.split("=", 1)[0] for also in args.also])
    text = f"{told}\n\n{tables}"
    print(f"\n{text}\n\n{out}")
    if args.keep:
        keep_in_docs(text)


if __name__ == "__main__":
    main()
