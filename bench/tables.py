"""What is said of a run: medians, ratios to the floor within each round, goals."""

import os
import platform
import statistics
import subprocess
from pathlib import Path

from peers import WATCH_MS
from processes import HERE


def mid(values):
    values = [v for v in values if v is not None]
    return statistics.median(values) if values else None


def say(value):
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values):
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    return say(mid(values)) if len(values) == 1 else f"{say(mid(values))} ({say(min(values))}-{say(max(values))})"


class Results:
    def __init__(self, samples):
        self.at = {(s["measure"], s["peer"], s["round"]): s for s in samples}
        self.peers = list(dict.fromkeys(s["peer"] for s in samples))
        self.measures = list(dict.fromkeys(s["measure"] for s in samples))

    def values(self, measure, peer, key):
        return [s.get(key) for (m, p, _), s in self.at.items() if (m, p) == (measure, peer) and s.get(key) is not None]

    def over(self, measure, peer, key, added):
        """To the floor, within each round; of what is added to `direct`, where asked."""
        out = []
        for (m, p, n), s in self.at.items():
            floor, direct = self.at.get((measure, "floor", n)), self.at.get((measure, "direct", n))
            if (m, p) != (measure, peer) or not floor or s.get(key) is None or not floor.get(key):
                continue
            less = direct[key] if added and direct else 0
            if floor[key] > less:
                out.append((s[key] - less) / (floor[key] - less))
        return out


# measure, key, what it is, over the floor?, added to direct?, goal
GOALS = [
    ("small", "cpu_us", "CPU per small request, µs", True, False, "≤ 1.15; fleet ≤ 1.5"),
    ("rate500", "p50", "added p50 at 500/s, µs", True, True, "≤ 1.25; fleet + one trip to Redis"),
    ("rate500", "p99", "added p99 at 500/s, µs", True, True, "≤ 1.25"),
    ("stream200", "cpu_us", "CPU per chunk, 200 streams, µs", True, False, "≤ 1.1"),
    ("stream20", "p50", "added chunk delay p50, 20 streams, µs", True, True, "≤ 1.1"),
    ("stream20", "p99", "added chunk delay p99, 20 streams, µs", True, True, "≤ 1.3"),
    ("stream20", "ttfb", "added first byte, 20 streams, µs", True, True, "≤ 1.2"),
    ("tls", "cpu_us", "CPU per small request, HTTP/2 over TLS on both sides, µs", True, False, "≤ 1.15; fleet ≤ 1.5"),
    ("memory", "kib", "memory per open stream, KiB", False, False, "≤ 32"),
    ("body1", "cpu_ms", "CPU of a 1 MB request, ms", True, False, "≤ 1.5"),
    ("body10", "cpu_ms", "CPU of a 10 MB request, ms", True, False, "≤ 1.8"),
    ("bodies", "peak", "peak memory of four 10 MB bodies, of their bytes", False, False, "≤ 1.25"),
    ("fail.none", "ms", "first byte without a failover, ms", False, False, ""),
    ("fail.503", "ms", "first byte after a 503, ms", False, False, "≤ 1.5 added"),
    ("fail.429", "ms", "first byte after a 429, ms", False, False, "≤ 1.5 added"),
    ("fail.truncate", "ms", "first byte after 200, then closed, ms", False, False, "≤ 1.5 added"),
    ("fail.sse-error", "ms", "first byte after an error as first event, ms", False, False, "≤ 1.5 added"),
    ("fail.hang", "ms", f"first byte after silence, W = {WATCH_MS}, ms", False, False, "≤ W + 5"),
    ("fail.stall", "ms", f"first byte after 200 and silence, W = {WATCH_MS}, ms", False, False, "≤ W + 5"),
    ("far", "p50", "failure seen to next request out, TLS, 20 ms away, p50, ms", False, False, ""),
    ("far", "p99", "the same, p99, ms", False, False, "≤ 25"),
    ("leave", "ended", "of 20 left streams, ended upstream within 100 ms", False, False, "20"),
    ("hot", "ratio", "CPU per request on one account over 1,000 accounts", False, False, "≤ 1.11"),
    ("grow.endpoints", "ratio", "CPU per request, 1,000 routes over 1", False, False, "≤ 1.1"),
    ("grow.keys", "ratio", "CPU per request, 1,000,000 keys over 1", False, False, "≤ 1.1"),
    ("grow.holds", "ratio", "CPU per request, 10,000 open streams over none", False, False, "≤ 1.1"),
    ("start", "secs", "start to first served request, s", False, False, "≤ 0.1; fleet ≤ 0.3"),
    ("start", "rss", "idle memory, MiB", False, False, "≤ 20; fleet ≤ 25"),
    ("allocations", "request", "allocations per small request", False, False, ""),
    ("allocations", "request_bytes", "bytes allocated per small request", False, False, ""),
    ("allocations", "chunk", "allocations per chunk", False, False, ""),
    ("counts", "syscalls", "system calls per small request", False, False, ""),
    ("counts", "journal_bytes", "journal bytes per small request", False, False, ""),
    ("counts", "redis", "commands to Redis per small request", False, False, "2"),
    ("redis_trip", "us", "a round trip to Redis with nothing else, µs", False, False, ""),
]


def report(samples, also):
    """Markdown: median (min-max) over the rounds."""
    results = Results(samples)
    ours = [p for p in results.peers if p.startswith("tollgate") or p in also or p.removesuffix("-fleet") in also]
    out = ["| measure | floor | " + " | ".join(f"{p} | × floor" for p in ours) + " | goal |", "|---|---|" + "---|---|" * len(ours) + "---|"]
    for measure, key, what, over, added, goal in GOALS:
        if measure not in results.measures:
            continue
        direct = mid(results.values(measure, "direct", key)) if added else 0
        shown = lambda p: spread([v - (direct or 0) for v in results.values(measure, p, key)])
        row = [what, shown("floor")]
        for p in ours:
            row += [shown(p), spread(results.over(measure, p, key, added)) if over else ""]
        out.append("| " + " | ".join(row + [goal]) + " |")
    others = [p for p in results.peers if p not in ours and p not in ("direct", "floor")]
    if others:
        out += ["", "| measure, × floor | " + " | ".join(others) + " |", "|---|" + "---|" * len(others)]
        for measure, key, what, over, added, _ in GOALS:
            if measure in results.measures and over:
                out.append(f"| {what} | " + " | ".join(spread(results.over(measure, p, key, added)) for p in others) + " |")
    tries = [(m, p, s) for (m, p, _), s in results.at.items() if m.startswith("fail.")]
    if tries:
        out += ["", "Failovers that ended in a whole, good answer: " + "; ".join(f"{m[5:]} {s['ok']} of {s['of']} (worst {say(s['worst'])} ms)" for m, p, s in tries if p == ours[0]) + "."]
    for p in ours:
        threads = [s["threads"] for (m, q, _), s in results.at.items() if (m, q) == ("small", p)]
        if threads:
            names = sorted({n for t in threads for n in t})
            out += ["", f"{p}: CPU per small request by thread, µs: " + ", ".join(f"{n} {say(mid([t.get(n, 0) for t in threads]))}" for n in names) + "."]
        for (m, q, _), s in results.at.items():
            if (m, q) == ("counts", p) and s.get("calls"):
                out += ["", f"{p}: system calls per small request at saturation: " + ", ".join(f"{k} {v}" for k, v in s["calls"].items()) + "."]
    return "\n".join(out)


def conditions(samples, began, build):
    cpu = next((l.split(":", 1)[1].strip() for l in Path("/proc/cpuinfo").read_text().splitlines() if l.startswith("model name")), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    busy = [s["machine"] for s in samples if s.get("machine") is not None]
    return (f"{began}, commit {commit}, {build}. {os.cpu_count()} cores of {cpu}, Linux {platform.release()}; cores busy while measuring, this run included: "
            f"{spread(busy)}; load average at its end {os.getloadavg()[0]:.1f}.")


def keep_in_docs(text):
    file = HERE.parent / "docs/performance.md"
    head, rest = file.read_text().split("<!-- results -->\n", 1)
    tail = rest.split("<!-- end of results -->", 1)[1]
    file.write_text(f"{head}<!-- results -->\n\n{text}\n\n<!-- end of results -->{tail}")


