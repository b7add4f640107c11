"""The embedded store's money protocol, with boots and hand-over, as a model that is searched whole.

Run `tests/model/run` (all of it, minutes) or `tests/model/run --quick` (CI, seconds).

WHAT IS MODELLED. One account with a balance of 2, three calls with holds of 2, 1 and 1: twice what the
money carries. A call may cost anything up to its hold, unit by unit.
  Ledger   balance (posted, leased), a row per boot (ended or not), its lease row, settlements with the
           hold's id as their key. Every transaction is atomic and durable (SQLite, synchronous=FULL).
  Journal  a folder per boot with a lock that dies with its process, and in it a hold, a progress and a
           settled record per call. A record is in the kernel first and on the disk after a sync.
  Memory   what a process has free to admit on, and where each of its calls stands.
Steps: start (look for dead boots, replay, repair; begin boot, make journal, lease, install), lease again
what is free, admit, write hold, deliver, tick (progress), sync, close, settle and end, post a batch,
stop (SIGTERM) or hand over (SIGQUIT), end boot, delete folder, leave. Every transaction and its effect in
memory are two steps, so every order of two processes and a death between any two of them is tried.
Faults: `kill` (kill -9 of one process) and `power` (all processes die, what was not synced is gone,
a deleted folder may be back). Time: a unit can be delivered only when the one before it stands in a
progress record, and the one before that on the disk; a unit is what streams within a tick.

WHAT MUST HOLD (`wrong`): no balance is negative; leases sum to no more than it; open holds of living
processes and charges that are not booked yet never exceed it (so never N+1 holds on money for N, also
while two processes run); no call is booked above what was delivered; a call whose end the caller saw, or
whose settled record was in the kernel, is booked exactly after a kill; a killed stream is short of its
last tick at most; after a power cut the same holds for what was synced; when a journal is gone, the
ledger has all that was in it; when all is over, nothing is leased. And, from every state, all can be over.

WHAT IS DELIBERATELY ABSENT. Several accounts (transactions are per account, or atomic over all of them);
top-ups (free money, as handed-over money is); a cost above the hold (taking the excess is an admit without
waiting); refusals of a full disk, torn or damaged records, journal segments (replay tests have those);
rate limits, which ride in the same hand-over; loss of the disk itself; three processes at once; a signal
while a lease is between transaction and memory or a journal is being replayed (it has to wait for that).
"""

from itertools import product
from typing import NamedTuple

from explore import Refused

BALANCE = 2

# Where a call stands.
IDLE, RESERVED, OPEN, CLOSED, SEEN, CUT, DONE = range(7)
# Where a process stands.
STARTING, BEGUN, PREPARED, RUNNING, HANDING, HALF_HANDED, DRAINING, ENDED, GIVEN_UP = range(9)
# A journal's folder. HALF: its lock file is deleted already. GHOST: deleted, but a power cut may undo that.
NONE, THERE, HALF, GHOST = range(4)
# How far the replay of another boot has come. REPAIR: a boot without a folder was found.
REPAIR, SETTLED_POSTED, ORPHANS_POSTED, BOOT_ENDED = range(4)
NO_ROW = -1
NOBODY = -1
# A record: none, an open hold with its progress, or settled at a cost.
NO_RECORD, SETTLED = -1, 10


class Rules(NamedTuple):
    """The protocol's rules; a variant breaks one."""

    one_start_at_a_time: bool = True     # a lock from the look for dead boots to the lease
    guarded_repair: bool = False         # instead: repair ends no boot with a lease, an ended boot leases nothing
    repair: bool = True                  # a boot without a folder is ended
    replay_only_free_locks: bool = True
    journal_before_lease: bool = True
    folder_name_synced: bool = True      # also its parent folder is synced before money is leased
    hold_before_forward: bool = True
    settle_before_end: bool = True
    post_once: bool = True               # by hold id
    calls_over_before_end_boot: bool = True
    post_before_end_boot: bool = True
    end_boot_before_delete: bool = True
    hand_over: bool = True               # SIGQUIT is known, and a running process leases again
    keep: str = "all that is not free"   # or "open holds", or "what the journal knows"
    memory_before_return: bool = True
    return_in: str = "one transaction"   # or "two, the balance first", or "two, the lease first"
    new_waits_for_ledger: bool = True
    lease_adds: bool = True              # a further lease adds what it got, not the row's total
    returns_again: bool = False          # a draining process admits on what it kept and what calls release, and
    #                                      returns what is free again and again


class Bounds(NamedTuple):
    """How much may go wrong."""

    kills: int = 0
    powers: int = 0
    upgrades: int = 1  # starts while another process is there
    holds: tuple = (2, 1, 1)


class Process(NamedTuple):
    at: int = STARTING
    free: int = 0       # memory: what may be held
    moving: int = 0     # between a transaction and its effect in memory
    work: int = NOBODY  # the boot that it replays or repairs
    stage: int = 0


class Boot(NamedTuple):
    row: bool = False  # begun and not ended
    lease: int = NO_ROW
    folder: int = NONE
    process: Process | None = None


class Call(NamedTuple):
    phase: int = IDLE
    boot: int = NOBODY
    delivered: int = 0
    kernel: int = NO_RECORD
    disk: int = NO_RECORD
    booked: int = -1  # what the ledger has charged
    least: int = 0    # CUT: what it must be charged at least


class State(NamedTuple):
    posted: int
    leased: int
    boots: tuple
    calls: tuple
    bounds: Bounds


def cost_of(record):
    """What a replay charges for a record."""
    return record - SETTLED if record >= SETTLED else max(record, 0)


def with_boot(state, b, **change):
    boots = state.boots
    return state._replace(boots=boots[:b] + (boots[b]._replace(**change),) + boots[b + 1:])


def with_process(state, b, **change):
    return with_boot(state, b, process=state.boots[b].process._replace(**change))


def with_call(state, i, **change):
    calls = state.calls
    return state._replace(calls=calls[:i] + (calls[i]._replace(**change),) + calls[i + 1:])


def calls_of(state, b):
    return [(i, call) for i, call in enumerate(state.calls) if call.boot == b and call.phase != DONE]


def unmade(boot):
    return boot.folder in (NONE, GHOST)


def name(b):
    return "ABCDEF"[b]


class Embedded:
    def __init__(self, rules=Rules(), bounds=Bounds()):
        self.rules, self.bounds, self.holds = rules, bounds, bounds.holds

    def first(self):
        return State(BALANCE, 0, (), (Call(),) * len(self.holds), self.bounds._replace(holds=()))

    def steps(self, state):
        yield from self.start(state)
        for b, boot in enumerate(state.boots):
            if boot.process:
                yield from self.life(state, b, boot, boot.process)
                yield from self.replay(state, b, boot.process)
                if boot.process.at >= RUNNING:
                    yield from self.serve(state, b, boot, boot.process)
        yield from self.faults(state)

    # A process from its start to its end.

    def start(self, state):
        living = sum(boot.process is not None for boot in state.boots)
        upgrade = living > 0
        if living > 1 or (upgrade and not state.bounds.upgrades) or not self.may_start(state, NOBODY):
            return
        empty = next((b for b, boot in enumerate(state.boots) if boot == Boot()), len(state.boots))
        boots = state.boots[:empty] + (Boot(process=Process()),) + state.boots[empty + 1:]
        bounds = state.bounds._replace(upgrades=state.bounds.upgrades - upgrade)
        yield f"{name(empty)} starts", False, state._replace(boots=boots, bounds=bounds)

    def may_start(self, state, me):
        """Whether nobody else is between its look for dead boots and its lease."""
        return not self.rules.one_start_at_a_time or all(
            b == me or not boot.process or (boot.process.at >= RUNNING and boot.process.work == NOBODY)
            for b, boot in enumerate(state.boots))

    def life(self, state, b, boot, me):
        rules, who = self.rules, name(b)
        free = state.posted - state.leased
        if me.at == STARTING and me.work == NOBODY and not self.dead(state, b) and not self.lost(state, b):
            yield f"{who} begins its boot", False, with_boot(state, b, row=True, process=Process(BEGUN))
        if me.at == (BEGUN if rules.journal_before_lease else PREPARED):
            at = PREPARED if rules.journal_before_lease else RUNNING
            made = with_boot(state, b, folder=THERE)
            yield f"{who} makes its journal", False, with_process(made, b, at=at)
        if me.at == (PREPARED if rules.journal_before_lease else BEGUN):
            at = RUNNING if rules.journal_before_lease else PREPARED
            if rules.guarded_repair and not boot.row:
                yield f"{who} is refused a lease and leaves", False, with_process(state, b, at=GIVEN_UP)
            else:
                leased = with_boot(state, b, lease=max(boot.lease, 0) + free)._replace(leased=state.posted)
                yield f"{who} leases {free}", False, with_process(leased, b, at=at, free=free)
        if me.at == GIVEN_UP:
            yield f"{who} is gone", False, with_boot(state, b, process=None)
        if me.at == RUNNING:
            yield from self.run(state, b, boot, me, free)
        if me.at in (HANDING, HALF_HANDED):
            yield from self.hand_over(state, b, boot, me)
        if me.at in (DRAINING, ENDED):
            yield from self.leave(state, b, boot, me)

    def run(self, state, b, boot, me, free):
        rules, who = self.rules, name(b)
        others = [boot for other, boot in enumerate(state.boots) if other != b and boot.process]
        if free > 0 and not me.moving and rules.hand_over:
            total = max(boot.lease, 0) + free
            leased = with_boot(state, b, lease=total)._replace(leased=state.posted)
            moving = free if rules.lease_adds else total
            if not rules.new_waits_for_ledger and me.free:
                moving = 0  # it has spent that already
            yield f"{who} leases {free} more", False, with_process(leased, b, moving=moving)
        if me.moving:
            after = me.free + me.moving if rules.lease_adds else me.moving
            yield f"{who} may spend it", False, with_process(state, b, free=after, moving=0)
        if not rules.new_waits_for_ledger and boot.lease <= 0 and not me.free:
            for other in others:
                if other.process.free:
                    yield f"{who} takes the announced {other.process.free}", False, with_process(
                        state, b, free=other.process.free)
        if me.work != NOBODY or me.moving:
            return
        yield f"{who} gets SIGTERM", False, with_process(
            state, b, at=DRAINING, free=me.free if rules.returns_again else 0)
        if not others or not rules.hand_over:
            return
        if rules.memory_before_return:
            back = me.free
            if rules.keep != "all that is not free":
                back = boot.lease - self.kept(calls_of(state, b))
            # With calls still arriving it keeps a part for them.
            for kept in range(back + 1) if rules.returns_again else (0,):
                words = f"{who} gets SIGQUIT and keeps {kept}" if kept else f"{who} gets SIGQUIT and admits no more"
                yield words, False, with_process(state, b, at=HANDING, free=kept, moving=back - kept)
        else:
            returned = with_boot(state, b, lease=boot.lease - me.free)._replace(leased=state.leased - me.free)
            yield f"{who} gets SIGQUIT and returns {me.free}", False, with_process(
                returned, b, at=HANDING, moving=me.free)

    def kept(self, mine):
        """Two ways to count what a hand-over keeps, both wrong."""
        if self.rules.keep == "open holds":
            return sum(self.holds[i] for i, c in mine if c.phase in (RESERVED, OPEN))
        return sum(self.holds[i] if c.kernel < SETTLED else c.delivered
                   for i, c in mine if c.kernel != NO_RECORD and c.booked < 0)

    def hand_over(self, state, b, boot, me):
        who, back = name(b), me.moving
        if not self.rules.memory_before_return:
            yield f"{who} takes it out of memory", False, with_process(state, b, at=DRAINING, free=0, moving=0)
        elif self.rules.return_in == "one transaction":
            yield f"{who} returns {back}", False, with_process(self.returned(state, b, back), b, at=DRAINING, moving=0)
        else:
            first = me.at == HANDING
            if first == (self.rules.return_in == "two, the balance first"):
                words, half = f"{who} returns {back} to the balance", state._replace(leased=state.leased - back)
            else:
                words, half = f"{who} takes {back} off its lease", with_boot(state, b, lease=boot.lease - back)
            at, moving = (HALF_HANDED, back) if first else (DRAINING, 0)
            yield words, False, with_process(half, b, at=at, moving=moving)

    def returned(self, state, b, back):
        lease = state.boots[b].lease - back
        return with_boot(state, b, lease=lease)._replace(leased=state.leased - back)

    def leave(self, state, b, boot, me):
        rules, who = self.rules, name(b)
        if rules.returns_again and me.at == DRAINING and me.free and not me.moving:
            yield f"{who} takes {me.free} out of memory", False, with_process(state, b, free=0, moving=me.free)
        if rules.returns_again and me.at == DRAINING and me.moving:
            yield f"{who} returns {me.moving} more", False, with_process(
                self.returned(state, b, me.moving), b, moving=0)
            return  # it does one thing after the other
        mine = calls_of(state, b)
        over = all(c.phase in (SEEN, CUT) for _, c in mine) or not rules.calls_over_before_end_boot
        posted = not rules.post_before_end_boot or all(
            c.booked >= 0 for _, c in mine if c.phase in (SEEN, CUT))
        deleted = unmade(boot) or rules.end_boot_before_delete
        if me.at == DRAINING and over:
            if not deleted:
                yield f"{who} deletes its folder", False, with_boot(state, b, folder=GHOST)
            elif posted:
                yield f"{who} ends its boot", False, with_process(self.ended(state, b), b, at=ENDED)
        if me.at == ENDED:
            if boot.folder == THERE:
                yield f"{who} deletes its lock file", False, with_boot(state, b, folder=HALF)
            else:
                # Calls that are open still are cut with the process.
                yield f"{who} deletes its folder and leaves", False, self.killed(
                    with_boot(state, b, folder=GHOST), b)

    def ended(self, state, b):
        back = max(state.boots[b].lease, 0)
        return with_boot(state, b, row=False, lease=NO_ROW)._replace(leased=state.leased - back)

    # What a start does with boots that died, and what a running process may do at any time.

    def dead(self, state, me):
        """Boots whose folder is there and whose lock can be taken."""
        taken = {boot.process.work for boot in state.boots if boot.process and boot.process.stage != REPAIR}
        return [x for x, boot in enumerate(state.boots) if x != me and x not in taken and (
            boot.folder == HALF or (boot.folder == THERE and (
                boot.process is None or not self.rules.replay_only_free_locks)))]

    def lost(self, state, me):
        """Boots that never ended and have no folder."""
        return [x for x, boot in enumerate(state.boots)
                if x != me and self.rules.repair and boot.row and unmade(boot)]

    def replay(self, state, b, me):
        who, x = name(b), me.work
        if x == NOBODY:
            if me.at not in (STARTING, RUNNING) or me.moving or not self.may_start(state, b):
                return
            for x in self.dead(state, b):
                records = [(i, cost_of(c.kernel)) for i, c in calls_of(state, x) if c.kernel >= SETTLED]
                words = f"{who} locks {name(x)}'s journal and posts its ends"
                yield words, False, with_process(
                    self.posted(state, x, records, words), b, work=x, stage=SETTLED_POSTED)
            for x in self.lost(state, b) if me.at == STARTING else ():
                yield f"{who} finds no folder of {name(x)}", False, with_process(state, b, work=x, stage=REPAIR)
        elif me.stage == SETTLED_POSTED:
            orphans = [(i, cost_of(c.kernel)) for i, c in calls_of(state, x) if 0 <= c.kernel < SETTLED]
            words = f"{who} posts {name(x)}'s orphans"
            yield words, False, with_process(
                self.posted(state, x, orphans, words), b, stage=ORPHANS_POSTED)
        elif me.stage == ORPHANS_POSTED:
            yield f"{who} ends boot {name(x)}", False, with_process(self.ended(state, x), b, stage=BOOT_ENDED)
        elif me.stage == BOOT_ENDED:
            yield f"{who} deletes {name(x)}'s folder", False, with_process(
                with_boot(state, x, folder=GHOST), b, work=NOBODY, stage=0)
        elif self.rules.guarded_repair and state.boots[x].lease != NO_ROW:
            yield f"{who} leaves {name(x)} alone", False, with_process(state, b, work=NOBODY)
        else:
            yield f"{who} ends boot {name(x)}", False, with_process(self.ended(state, x), b, work=NOBODY)

    def posted(self, state, b, charges, words):
        """One transaction: books each charge against the lease of a boot, once per hold."""
        posted, leased, lease = state.posted, state.leased, state.boots[b].lease
        for i, cost in charges:
            booked = state.calls[i].booked
            if booked >= 0 and self.rules.post_once:
                continue
            posted, leased = posted - cost, leased - cost
            lease = lease if lease == NO_ROW else lease - cost
            if lease < NO_ROW or (lease < 0 <= state.boots[b].lease) or not 0 <= leased <= posted:
                raise Refused("the ledger's CHECK refuses a charge for ever", words)
            state = with_call(state, i, booked=max(booked, 0) + cost)
        return with_boot(state, b, lease=lease)._replace(posted=posted, leased=leased)

    # Calls.

    def serve(self, state, b, boot, me):
        rules, who = self.rules, name(b)
        admits = me.at == RUNNING or (me.at == HANDING and not rules.memory_before_return) or (
            rules.returns_again and me.at in (HANDING, DRAINING))
        moved = []
        for i, call in enumerate(state.calls):
            if call.phase == IDLE and admits and me.free >= self.holds[i]:
                if i == 2 and state.calls[1].phase == IDLE:
                    continue  # calls 1 and 2 are alike
                held = with_process(state, b, free=me.free - self.holds[i])
                yield f"{who} admits call {i}", False, with_call(held, i, phase=RESERVED, boot=b)
            if call.boot != b:
                continue
            if call.phase == RESERVED:
                yield f"{who} writes hold {i}", False, with_call(state, i, phase=OPEN, kernel=call.delivered)
            if call.phase == OPEN or (call.phase == RESERVED and not rules.hold_before_forward):
                in_time = call.delivered <= max(call.kernel, 0) or call.phase == RESERVED
                if state.bounds.powers:
                    in_time = in_time and call.delivered <= max(call.disk, 0) + 1
                if call.delivered < self.holds[i] and in_time:
                    yield f"{who} delivers to call {i}", False, with_call(
                        state, i, delivered=call.delivered + 1)
            if call.phase == OPEN:
                if call.delivered > call.kernel:
                    moved.append(i)
                back = self.holds[i] - call.delivered if admits else 0
                yield f"{who} closes call {i}", False, with_call(
                    with_process(state, b, free=me.free + back), i, phase=CLOSED)
            record = SETTLED + call.delivered
            # Nothing else depends on the moment at which the end is delivered: one step where the record is first.
            if call.phase == CLOSED and rules.settle_before_end:
                yield f"{who} settles call {i} and delivers its end", False, with_call(
                    state, i, phase=SEEN, kernel=record)
            elif call.phase == CLOSED:
                yield f"{who} delivers the end of call {i}", False, with_call(state, i, phase=SEEN)
            elif call.phase == SEEN and call.kernel < SETTLED:
                yield f"{who} settles call {i}", False, with_call(state, i, kernel=record)
        if moved:
            ticked = state
            for i in moved:
                ticked = with_call(ticked, i, kernel=state.calls[i].delivered)
            yield f"{who} writes progress", False, ticked
        mine = calls_of(state, b)
        batch = [(i, cost_of(c.kernel)) for i, c in mine if c.kernel >= SETTLED and c.booked < 0]
        if batch:
            words = f"{who} posts {', '.join(f'call {i}' for i, _ in batch)}"
            yield words, False, self.posted(state, b, batch, words)
        if state.bounds.powers and any(c.disk != c.kernel for _, c in mine):
            synced = state
            for i, call in mine:
                synced = with_call(synced, i, disk=call.kernel)
            yield f"{who} syncs its journal", False, synced

    # Faults.

    def faults(self, state):
        bounds = state.bounds
        if bounds.kills:
            left = state._replace(bounds=bounds._replace(kills=bounds.kills - 1))
            for b, boot in enumerate(state.boots):
                if boot.process:
                    yield f"KILL {name(b)}", True, self.killed(left, b)
        if bounds.powers:
            left = state._replace(bounds=bounds._replace(powers=bounds.powers - 1))
            for b, boot in enumerate(state.boots):
                if boot.process:
                    left = self.killed(left, b)
            if not any(boot.process for boot in state.boots):
                return
            left = left._replace(calls=tuple(self.lost_tail(call) for call in left.calls))
            for folders in product(*(self.after_power(boot.folder) for boot in left.boots)):
                boots = tuple(boot._replace(folder=f) for boot, f in zip(left.boots, folders))
                yield "POWER CUT", True, left._replace(boots=boots)

    def killed(self, state, b):
        folder = THERE if state.boots[b].folder == HALF else state.boots[b].folder
        state = with_boot(state, b, process=None, folder=folder)
        for i, call in calls_of(state, b):
            if call.phase != CUT:
                exact = call.phase == SEEN or call.kernel >= SETTLED
                least = call.delivered if exact else max(call.delivered - 1, 0)
                state = with_call(state, i, phase=CUT, least=least)
        return state

    def lost_tail(self, call):
        if call.phase != CUT:
            return call
        least = call.least if call.booked >= 0 else min(call.least, cost_of(call.disk))
        return call._replace(kernel=call.disk, least=least)

    def after_power(self, folder):
        if folder == GHOST or (folder == THERE and not self.rules.folder_name_synced):
            return (NONE, THERE)
        return (folder,)

    # What must hold.

    def wrong(self, state):
        posted, leased = state.posted, state.leased
        if not 0 <= leased <= posted:
            return f"balance {posted} with {leased} leased"
        leases = sum(max(boot.lease, 0) for boot in state.boots)
        if leases > posted:
            return f"leases of {leases} on a balance of {posted}"
        claims = 0
        for i, call in enumerate(state.calls):
            if call.phase in (RESERVED, OPEN):
                claims += self.holds[i]
            elif call.booked < 0 and call.phase in (CLOSED, SEEN):
                claims += call.delivered
            elif call.booked < 0 and call.phase == CUT:
                claims += cost_of(call.kernel)
            if call.booked > call.delivered:
                return f"call {i} is charged {call.booked} for {call.delivered} delivered"
            if call.phase in (SEEN, CUT):
                least = call.delivered if call.phase == SEEN else call.least
                gone = call.boot == NOBODY or (
                    unmade(state.boots[call.boot]) and not state.boots[call.boot].process)
                if (call.booked >= 0 or gone) and max(call.booked, 0) < least:
                    seen = "its end seen, " if call.phase == SEEN else ""
                    return f"call {i}: {call.delivered} delivered, {seen}{max(call.booked, 0)} charged for ever"
        if claims > posted:
            return f"holds and charges of {claims} on a balance of {posted}"
        if self.at_rest(state) and leased:
            return f"{leased} leased to nobody"
        return None

    def at_rest(self, state):
        """Nothing runs, nothing is left to replay, nothing is leased."""
        return all(unmade(boot) and not boot.process and boot.lease == NO_ROW for boot in state.boots)

    def tidy(self, state):
        """Forgets what no later step can see: finished calls, boots of which nothing is left."""
        boots = state.boots
        if not state.bounds.powers:
            boots = tuple(boot._replace(folder=NONE) if boot.folder == GHOST else boot for boot in boots)
        worked = {boot.process.work for boot in boots if boot.process}
        over = {b for b, boot in enumerate(boots) if boot.folder == NONE and not boot.process and b not in worked}
        once = self.rules.post_once
        calls = tuple(Call(DONE) if call.phase in (SEEN, CUT) and (
            call.boot in over or (once and call.booked >= 0)) else call for call in state.calls)
        if state.bounds.powers:
            # A folder that may come back matters only for calls that are in it.
            used = {call.boot for call in calls}
            boots = tuple(boot._replace(folder=NONE)
                          if boot.folder == GHOST and b not in used and b not in worked and not boot.process
                          and not boot.row else boot for b, boot in enumerate(boots))
        while boots and boots[-1] == Boot() and len(boots) - 1 not in worked:
            boots = boots[:-1]
        return state._replace(boots=boots, calls=calls)
