"""One trial: a run that is killed, started again until it is complete, and compared with the undisturbed one."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from recipes import processes
from recipes.faults.corpus import write_corpus
from recipes.faults.plan import EVERY, STEPS, Kill, Moment, Victim, plan, targets
from recipes.faults.same import differences
from recipes.faults.seen import found, names, new_work, pointed, published, removing, renamed, states_written, step
from recipes.faults.start import STARTS, Start, creep, proceed, wait
from recipes.run_folder import read_metrics

LIMIT = 300.0  # seconds for one start of the run
MEETING = 3.0  # seconds for a rank whose peer died before they met: it waits for it until whatever started it ends it
MODEL = ("model=tiny", "model.layers=4", "data.seq_length=32", "data.batch_size=4", "data.micro_batch_size=2")
RUN = (
    *("data.heldout_tokens=300", "parallel.dp=2", "parallel.ep=2", f"run.steps={STEPS}", f"run.eval_every={EVERY}"),
    *("run.sample_tokens=0", f"checkpoint.every={EVERY}", "checkpoint.keep_last=1", "wandb.mode=disabled", "run.resume=auto"),
)


@dataclass
class Killed:
    """moment: as found right after the kill, None where the run had ended before; continued: the step from which the next start
    went on, 0 for the beginning; survived: seconds that the other rank took to end by itself, None where there was none.
    """

    kill: Kill
    moment: Moment | None
    continued: int = 0
    survived: float | None = None


@dataclass
class Trial:
    seed: int
    folder: Path
    kills: list[Killed] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Pace:
    """Medians of the undisturbed run, in seconds: until its first step, of a step, of a save, and from the last to the end."""

    start: float
    step: float
    save: float
    end: float


class Faults:
    """Trials of runs in `precision` (fp32 or bf16) under `home`; `how` they are started: fork or command."""

    def __init__(self, home: Path, precision: str, how: str = "fork"):
        self.home, self.precision, self.how = home, precision, how
        if not (home / "corpus").is_dir():
            write_corpus(home / "corpus")
        self.whole = home / f"{precision}-whole"
        self.pace = self._undisturbed()

    def start(self, folder: Path, number: int) -> tuple[Start, Path]:
        """The same command at every start, as a scheduler requeues it; what it says goes into the returned file."""
        where = (f"data.corpus={self.home / 'corpus'}", f"data.cache={self.home / 'cache'}", f"run.dir={folder}")
        log = folder.with_name(f"{folder.name}.{number}.log")
        log.write_text("")
        return STARTS[self.how]([*MODEL, *RUN, f"precision={self.precision}", *where], log), log

    def _undisturbed(self) -> Pace:
        for attempt in range(2):  # the first prepares the data and finds cold caches: only the second tells the pace
            shutil.rmtree(self.whole, ignore_errors=True)
            began = time.monotonic()
            start, log = self.start(self.whole, attempt)
            try:
                first = last = 0.0
                while None in start.codes() and time.monotonic() < began + LIMIT:
                    done = step(log)
                    first = first or (time.monotonic() if done else 0.0)
                    last = last or (time.monotonic() if done == STEPS else 0.0)
                    time.sleep(0.01)
                ended = time.monotonic()
                codes = start.codes()
            finally:
                start.close()
            if any(codes) or not last:
                raise RuntimeError(f"the undisturbed run failed ({codes}):\n{log.read_text()}")
        records = list(read_metrics(self.whole / "metrics.jsonl"))
        saves = [record["checkpoint/seconds"] for record in records if "checkpoint/seconds" in record]
        return Pace(first - began, middle([record["seconds"] for record in records]), middle(saves), ended - last)

    def trial(self, seed: int, sabotage: Callable[[Path], None] = lambda folder: None) -> Trial:
        """Does what `plan(seed)` says. Its folder stays where something went wrong. `sabotage`: done before every restart."""
        began = time.monotonic()
        trial = Trial(seed, self.home / f"{self.precision}-{seed}")
        shutil.rmtree(trial.folder, ignore_errors=True)
        for kill in plan(seed):
            self._one_start(trial, kill)
            if trial.wrong or trial.kills[-1].moment is None:
                break
            sabotage(trial.folder)
        if not trial.wrong:
            self._one_start(trial, None)
        if not trial.wrong:
            trial.wrong += differences(trial.folder, self.whole)
            trial.wrong += self._left_over(trial.folder)
        if not trial.wrong:
            shutil.rmtree(trial.folder)
        trial.seconds = time.monotonic() - began
        return trial

    def _one_start(self, trial: Trial, kill: Kill | None) -> None:
        """Starts the run and kills it, or with None waits for its end; then looks where it went on from."""
        checkpoints = trial.folder / "checkpoints"
        from_step = trial.kills[-1].continued if trial.kills else 0
        start, log = self.start(trial.folder, len(trial.kills))
        try:
            if kill is not None:
                trial.kills.append(self._killed(start, checkpoints, log, kill, trial))
            elif not wait(start, LIMIT):
                trial.wrong.append(f"the last start did not end within {LIMIT:.0f} s")
            elif any(start.codes()):
                trial.wrong.append(f"the last start ended with {start.codes()}; see {log}")
        finally:
            start.close()
        said = log.read_text()
        loaded = re.search(r"continuing from .*step_(\d+)$", said, flags=re.M)
        first = re.search(rf"^step (\d+)/{STEPS}:", said, flags=re.M)
        if loaded and int(loaded[1]) != from_step:
            trial.wrong.append(f"went on from step {loaded[1]}, and the last checkpoint was of step {from_step}; see {log}")
        if first and int(first[1]) != from_step + 1:
            trial.wrong.append(f"went on with step {first[1]}, and the last checkpoint was of step {from_step}; see {log}")

    def _killed(self, start: Start, checkpoints: Path, log: Path, kill: Kill, trial: Trial) -> Killed:
        base, there = published(checkpoints), names(checkpoints)
        self._await(start, checkpoints, log, kill, base, there)
        before = published(checkpoints)
        victims = {Victim.first: [0], Victim.second: [1], Victim.everyone: [0, 1]}[kill.victim]
        # rank 0 moves files: what it has left is seen after its death, what it does at the death of the other before that
        moment = found(checkpoints, log, kill, there)
        start.kill(victims)
        if 0 in victims:
            moment = found(checkpoints, log, kill, there)
        proceed(start.ranks())
        at, survived = time.monotonic(), None
        # before they have met, a rank waits for the other, and whatever has started it ends it
        met = step(log) > 0
        if not wait(start, processes.GRACE + 5 if met or self.how == "command" else MEETING):
            if met or self.how == "command":
                trial.wrong.append(f"{moment}: what was not killed did not end within {processes.GRACE + 5:.0f} s; see {log}")
        elif kill.victim is not Victim.everyone:
            survived = time.monotonic() - at
        if not any(code != 0 for code in start.codes()):
            return Killed(kill, None)
        continued = published(checkpoints)
        if continued < before:
            trial.wrong.append(f"{moment}: the checkpoint of step {before} was published, and {continued} is the last one now")
        return Killed(kill, moment, continued, survived)

    def _await(self, start: Start, checkpoints: Path, log: Path, kill: Kill, base: int, there: dict[str, int]) -> None:
        """Returns at the moment of the kill, or when the run has ended."""
        left = [number for number in targets(kill.moment) if number > base]
        at = kill.step if kill.step in left else left[0] if left else None
        pace, saved = self.pace, f"step_{at}"
        happened: Callable[[], bool]
        if kill.moment is Moment.starting or at is None:
            happened, delay = lambda: True, kill.wait * pace.start
        elif kill.moment is Moment.before:
            happened, delay = lambda: step(log) >= at, kill.wait * pace.step
        elif kill.moment is Moment.writing:
            happened, delay = lambda: bool(new_work(checkpoints, there, saved)), kill.wait * pace.save
        elif kill.moment is Moment.renamed:
            happened, delay = lambda: renamed(checkpoints / saved, there), 0.0
        elif kill.moment is Moment.removing:
            happened, delay = lambda: pointed(checkpoints) == at and bool(removing(checkpoints, there)), 0.0
        else:
            happened, delay = lambda: pointed(checkpoints) == at, kill.wait**2 * (pace.end if at == STEPS else pace.step)
        until = time.monotonic() + LIMIT
        running = lambda: None in start.codes() and time.monotonic() < until
        creeps = at is not None and kill.moment in (Moment.renamed, Moment.removing)
        while running() and not (new_work(checkpoints, there, saved) if creeps else happened()):
            time.sleep(0.002)
        if creeps and running():
            creep(start.ranks()[0], lambda: happened() or not running(), lambda: states_written(checkpoints, there))
        time.sleep(delay)

    def _left_over(self, folder: Path) -> Iterator[str]:
        """What is in the run folder and not in that of the undisturbed run, or the other way round."""
        for part in ("", "checkpoints"):
            here, whole = ({path.name for path in (of / part).iterdir()} for of in (folder, self.whole))
            if here != whole:
                yield f"{part or 'the run folder'}: left over {sorted(here - whole)}, missing {sorted(whole - here)}"


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
