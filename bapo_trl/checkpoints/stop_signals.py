"""A training that a signal stops: all ranks agree, finish the update, save, and leave with one exit code."""

import os
import signal
import threading
from typing import Any, NoReturn

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback

from ..upstream.fixes import end_training


EXIT_CODE = 75
"""Exit code of a run that saved and can go on: `EX_TEMPFAIL` of sysexits.h, "the user is invited to retry"."""

# The last is what SLURM can send ahead of the time limit without ending the launcher: see docs/resume.md
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals(TrainerCallback):
    """
    Ends a training after the update in which a signal comes: saves a checkpoint and stops, on all ranks alike.

    SIGTERM, SIGINT and SIGUSR1 are taken while `train()` runs in the main thread; before and after it they do what
    they did. One rank that receives one is enough. A second SIGINT does what it did before, at once. A signal that
    comes after the last epoch, too late to stop the training, does what it did before at the end of `train()`.
    `signal` is what stopped the last training, on all ranks the same; `None` if it went to its end.

    A forked child, of a reward or a data loader, ends by SIGTERM as it would. The others, which a terminal and SLURM
    send to all processes, do nothing to it: the update that is to be finished may need it.

    docs/resume.md has the lines of a script around `train()`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._received: list[int] = []
        self._earlier: dict[int, Any] = {}
        self._process, self._speaks = os.getpid(), False

    def on_train_begin(self, args, state, control, **kwargs):
        self.signal, self._received, self._process = None, [], os.getpid()
        self._speaks = state.is_world_process_zero
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            for number in _SIGNALS:
                self._earlier.setdefault(number, signal.signal(number, self._receive))

    def on_step_end(self, args, state, control, **kwargs):
        self._stop_if_signalled(args, control)
        return control

    def on_save(self, args, state, control, **kwargs):
        if self.signal is not None:
            # It is in the checkpoint. At its end, transformers would load the best model, and with `save_total_limit`
            # 1 delete all others, that of this moment among them.
            state.best_model_checkpoint = None

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.signal is not None:  # this update is saved
            control.should_save = control.should_evaluate = False
        else:  # one may have come while the last update was saved or evaluated
            self._stop_if_signalled(args, control)
        return control

    def on_train_end(self, args, state, control, **kwargs):
        self.restore()
        if self.signal is None and self._received:
            signal.raise_signal(self._received[0])

    def restore(self) -> None:
        """Put the earlier handlers back; needed where `train()` may raise."""
        while self._earlier:
            number, handler = self._earlier.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _stop_if_signalled(self, args, control) -> None:
        received = torch.tensor(max(self._received, default=0), device=args.device)
        if distributed.is_initialized():
            distributed.all_reduce(received, distributed.ReduceOp.MAX)
        if received.item():
            self.signal = signal.Signals(int(received.item()))
            control.should_save = control.should_training_stop = True
            control.should_evaluate = args.save_only_model = False  # it is saved to go on from

    def _receive(self, number: int, frame) -> None:
        if os.getpid() != self._process:  # a forked child has the handlers too
            if number == signal.SIGTERM:
                self.restore()
                signal.raise_signal(number)
            return
        if number == signal.SIGINT and number in self._received:
            self.restore()
            signal.raise_signal(number)
            return
        self._received.append(number)
        if self._speaks:
            again = " Once more ends it at once." if number == signal.SIGINT else ""
            text = f"\n{signal.Signals(number).name}: the run stops and saves after this update.{again}\n"
            os.write(2, text.encode())  # print is not made for handlers


def is_stopped(trainer: Trainer) -> bool:
    """Return whether a signal stops the training, or has stopped it, by a [`StopSignals`] among the callbacks."""
    callbacks = trainer.callback_handler.callbacks
    return any(isinstance(each, StopSignals) and each.signal is not None for each in callbacks)


def exit_stopped(trainer: Trainer) -> NoReturn:
    """
    Leave the process on all ranks with [`EXIT_CODE`], after a training that [`StopSignals`] ended.

    A launcher ends the other ranks as soon as the first has left. So no rank leaves before all have saved.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer.accelerator.wait_for_everyone()
    end_training(trainer)
    raise SystemExit(EXIT_CODE)
