"""Stop a training on a signal: all ranks finish the update, save a checkpoint and exit with the same code."""

import os
import signal
import threading
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback

from ..upstream.fixes import end_training


EXIT_CODE = 75
"""Exit code of a run that saved and can be resumed: `EX_TEMPFAIL` of sysexits.h, "the user is invited to retry"."""

# The last is what SLURM can send ahead of the time limit without ending the launcher: see docs/resume.md
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals(TrainerCallback):
    """
    Callback that stops a training on a signal: it finishes the update, saves a checkpoint and stops on all ranks.

    SIGTERM, SIGINT and SIGUSR1 are handled while `train()` runs in the main thread; otherwise they keep their effect.
    It is enough if one rank receives a signal. A second SIGINT has its usual effect at once. A signal that comes after
    the last epoch, too late to stop the training, has its usual effect at the end of `train()`. `signal` is the signal
    that stopped the last training, the same on all ranks; `None` if the training was not stopped.

    SIGTERM ends a forked child process of a reward function or a data loader as usual. Children ignore the other two,
    which a terminal and SLURM send to all processes, because the update may still need them.

    Call [`exit_stopped`] after `train()`, so that a script does not go on with a model that is not trained to its end.
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
            # It is in the checkpoint. At the end, transformers would load the best model and, with `save_total_limit`
            # 1, delete all other checkpoints, including this one.
            state.best_model_checkpoint = None

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.signal is not None:  # this update has been saved
            control.should_save = control.should_evaluate = False
        else:  # a signal may have come while the last update was saved or evaluated
            self._stop_if_signalled(args, control)
        return control

    def on_train_end(self, args, state, control, **kwargs):
        self.restore()
        if self.signal is None and self._received:
            signal.raise_signal(self._received[0])

    def restore(self) -> None:
        """Restore the earlier handlers; needed if `train()` raises an error."""
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
            control.should_evaluate = args.save_only_model = False  # the checkpoint must be resumable

    def _receive(self, number: int, frame) -> None:
        if os.getpid() != self._process:  # a forked child inherits the handlers
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
            again = " Press Ctrl+C again to stop at once." if number == signal.SIGINT else ""
            text = f"\n{signal.Signals(number).name}: the run stops and saves after this update.{again}\n"
            os.write(2, text.encode())  # print is not safe in a signal handler


def is_stopped(trainer: Trainer) -> bool:
    """Return whether a [`StopSignals`] callback is stopping the training, or has stopped it."""
    callbacks = trainer.callback_handler.callbacks
    return any(isinstance(each, StopSignals) and each.signal is not None for each in callbacks)


def exit_stopped(trainer: Trainer) -> None:
    """
    Exit the process on all ranks with [`EXIT_CODE`] if [`StopSignals`] stopped the training; else return.

    A launcher ends the other ranks as soon as the first exits. So no rank exits before all have saved.
    """
    if not is_stopped(trainer):
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer.accelerator.wait_for_everyone()
    end_training(trainer)
    raise SystemExit(EXIT_CODE)
