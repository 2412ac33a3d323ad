"""Trains a model, from the configuration to the last checkpoint. The whole run stands here, top to bottom.

    python train.py --config configs/tiny.yaml                                       one process
    torchrun --nproc-per-node 8 train.py --config configs/small.yaml optim.lr=3e-4   one process a GPU
    python train.py --config configs/ling_mini.yaml --dry-run                        check, count and stop

Exit status: 0 done; 2 a mistake in the configuration or in its files, or no memory for the experts' rows; 3 loss or gradient not
finite, or a spike; 4 replicas differ; 5 another rank is gone or hangs; 6 stopped with steps that are not saved; 143 stopped by a
signal, after saving (docs/reliability.md).
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported: idle OpenMP threads sleep instead of spinning

import torch

from fp8.health import Health
from fp8.transposed import keep_transposes
from fp8.weight import weights
from model.counts import flops_per_token
from model.transformer import Transformer
from parallel.grad_auto_scale import attach_auto_scale
from parallel.mesh import WIRES, build_mesh
from parallel.sharded_optimizer import make_optimizer
from training.checkpoint import Checkpointer
from training.command_line import command_line
from training.config import Config
from training.continuation import finished
from training.corpus import DataConfig
from training.data import Loader, PackedDataset, open_validation
from training.errors import STOPPED, UNSAVED, UserError, exit_status
from training.evaluate import evaluate
from training.faults import Guard, slowest, unhealthy, worst_of
from training.idle_keys import idle_keys
from training.metrics import Metrics, Phases, Throughput, console_line, expert_load, health_by_class, load_table
from training.packing import other_corpus, packed_path
from training.process import admit, choose_device, gather, leave, make_deterministic
from training.profile import ProfileWindow
from training.recovery import recover
from training.replicas import compare_replicas
from training.resources import Resources, detailed, steady_state
from training.sample import generate
from training.schedule import fit_note, learning_rate
from training.start import first_loss_problem, set_gradient_format, set_starting_values
from training.states import gradient_format, optimizer_states
from training.step import StepResult, TrainStep
from training.stopping import StopRequest, steps_lost
from training.tokenizer import check_vocab, load_tokenizer, other_vocabulary
from training.watchdog import Watchdog, record_collectives, recording


def run(config: Config) -> int:
    """The run on this rank; returns the exit status."""
    with ExitStack() as stack:
        this = Run(config, stack)
        this.build()
        if not this.restore():
            return 0
        this.open_logs()
        return this.loop()


class Run:
    """What one rank works with, in the order in which it comes to be; then the loop.

    What has to end with the run, however it ends, is on the stack. `done` counts optimizer steps.
    """

    # ---------------------------------------------------------------- ranks, data, model

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self.config, self.train, self.stack, self.done = config, config.train, stack, 0
        train, data, parallel, faults = config.train, config.data, config.parallel, config.faults
        self.stop = stack.enter_context(closing(StopRequest(faults.stop_within_s)))
        self.device, self.dtype = choose_device(train, config.fp8.recipe)
        record_collectives(config.run.dir)
        try:
            self.mesh = build_mesh(
                parallel.tp, parallel.ep, self.device, parallel.sequence_parallel, train.timeout_s,
                tp_wire=WIRES[parallel.tp_wire], combine_wire=WIRES[parallel.combine_wire], dispatch=parallel.dispatch,
                peer_copies=parallel.peer_copies,
            )  # fmt: skip
        except ValueError as error:  # ranks on hosts that `parallel.peer_copies` cannot have
            raise UserError(str(error)) from error
        self.metrics = stack.enter_context(closing(Metrics(config, active=self.mesh.world.rank == 0)))
        self.metrics.prefix = admit(config, self.device)
        on_nccl = recording(self.mesh.world.rank) if self.device.type == "cuda" and self.mesh.world.size > 1 else None
        self.watchdog = stack.enter_context(closing(Watchdog(self.mesh.world.rank, faults.quiet_s, recording=on_nccl)))
        self.tokenizer = load_tokenizer(data.tokenizer)
        check_vocab(self.tokenizer, config.model.vocab_size)
        packed = data.seq_len, self.tokenizer.fingerprint
        self.train_data = PackedDataset(packed_path(data.dir, "train"), *packed)
        self.val_data, none = open_validation(packed_path(data.dir, "validation"), *packed, config.eval.samples)
        self.metrics.warn(none)
        self.metrics.warn(other_corpus(data))
        self.metrics.warn(other_vocabulary(self.tokenizer, data.vocab_size, DataConfig.vocab_size))

    def build(self) -> None:
        """Model and optimizer; no values yet."""
        config, optim, parallel, mesh = self.config, self.config.optim, self.config.parallel, self.mesh
        torch.manual_seed(self.train.seed + mesh.world.rank)
        with torch.device(self.device):
            self.model = Transformer(config.model, config.fp8.build(), mesh, self.dtype, config.fp8.activations)
        set_gradient_format(self.model, gradient_format(optim, config.fp8.level))
        if config.fp8.keep_transposed:
            keep_transposes(weight for _, weight in weights(self.model))
        attach_auto_scale(self.model, mesh, parallel.grad_wire, parallel.simulated_ranks)
        self.optimizer = make_optimizer(
            self.model, mesh, zero=parallel.zero, partition=parallel.zero_partition, overlap=parallel.overlap_gather,
            beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay,
            states=optimizer_states(optim, config.fp8.level), seed=self.train.seed, offload=optim.offload,
        )  # fmt: skip

    def restore(self) -> bool:
        """Values from a checkpoint, or the first ones; and the data from where it was left. False when nothing is left to do."""
        config, train, mesh, metrics = self.config, self.train, self.mesh, self.metrics
        identity = {"tokenizer": self.tokenizer.fingerprint, "data": self.train_data.fingerprint}
        checkpointer = Checkpointer(config, self.model, self.optimizer, mesh, **identity)
        self.checkpointer = self.stack.enter_context(closing(checkpointer))
        self.state = state = self.checkpointer.restore(metrics.warn)
        if state is None:
            set_starting_values(config, self.model, self.optimizer, mesh, **identity, warn=metrics.warn)
        elif (nothing_left := finished(config, state, mesh.world, metrics.warn, self.val_data is not None)) is not None:
            metrics.say(nothing_left)
            return False
        self.checkpointer.prepare()
        self.done, consumed, self.wandb_id = (state.step, state.consumed, state.wandb_id) if state else (0, 0, None)
        self.loader = Loader(
            self.train_data, global_batch=train.global_batch, micro_batch=train.micro_batch, seed=train.seed, consumed=consumed,
            rank=mesh.dp.rank, num_ranks=mesh.dp.size, isolate_documents=config.data.isolate_documents,
        )  # fmt: skip
        return True

    # ---------------------------------------------------------------- logs

    def open_logs(self) -> None:
        """What is measured, and the first lines."""
        config, train, optim, parallel, mesh = self.config, self.train, self.config.optim, self.config.parallel, self.mesh
        metrics, device, checkpointer = self.metrics, self.device, self.checkpointer
        self.phases, self.guard = Phases(device), Guard(config.faults, self.state.history if self.state else ())
        flops = flops_per_token(config.model, config.data.seq_len)
        self.throughput = Throughput(config.tokens_per_step, flops, mesh.world.size, device)
        self.take_step = TrainStep(
            self.model, self.optimizer, mesh, optim, config.model.bias_update_rate, self.phases, auto=config.fp8.auto,
            cuda_graphs=train.cuda_graphs, grad_wire=parallel.grad_wire, grad_rounding=parallel.grad_rounding, zero=parallel.zero,
            simulated_ranks=parallel.simulated_ranks, guard=self.guard,
        )  # fmt: skip
        self.resources = Resources(self.model, self.optimizer, mesh, self.done)
        self.window = ProfileWindow(config.profile, config.run.dir, mesh.world.rank, device)
        self.phases.note = lambda name: self.watchdog.note(f"{name} of step {self.done}")
        self.stop.loss = lambda: steps_lost(self.done, checkpointer.last)
        self.wandb_id = metrics.start(self.done, self.wandb_id)
        metrics.say(f"{config.run.dir}: {mesh.world.size} x {device}, recipe {config.fp8.recipe}, steps {self.done}-{train.steps}")
        metrics.say(self.throughput.formula())
        if train.deterministic:
            metrics.say(make_deterministic(device))
        for note in (fit_note(optim, train.steps), *idle_keys(config, device.type, mesh.world.size), self.window.missed(self.done)):
            metrics.warn(note)

    # ---------------------------------------------------------------- the loop

    def loop(self) -> int:
        """Steps until all are done or a signal comes; returns the exit status."""
        config, train, metrics = self.config, self.train, self.metrics
        first, stopping = self.done + 1, self.stop.agreed(self.mesh.world)
        while self.done < train.steps and not stopping:
            self.done += 1
            last, logged = self.done == train.steps, self.done % train.log_every == 0 or self.done in (first, train.steps)
            health = Health() if due(config.fp8.health_every, self.done) else None
            for _, weight in weights(self.model):
                weight.health = health
            self.window.begin(self.done)
            with self.phases("data"):
                batches = [batch.to(self.device) for batch in next(self.loader)]
            self.mesh.traffic.timed = logged  # by events around each wait, which cost the host milliseconds a step
            lr = learning_rate(self.done - 1, config.optim, train.steps)
            result = self.take_step(self.done, batches, lr, self.stop.requested, want_counts=logged)
            stopping = result.interrupted and self.stop.arm()
            if result.problem is not None:
                if (back := recover(result.problem, self.done, self.guard, self.checkpointer, metrics)) is not None:
                    self.done = back
                    continue
                logged, health = False, None
            self.throughput.step()
            metrics.advance()
            for line in (*result.notes, *(f"wrote {path}" for path in self.window.end(self.done, last or stopping))):
                metrics.say(line)
            if health is not None:
                self.report_health(health)
            if logged:
                self.report(result, lr)
            if self.done == first:
                self.report_first(result, logged)
            if self.done == min(first + 1, train.steps):  # the optimizer's states come with the first update
                metrics.say(f"peak        {self.resources.peak(self.device)}")
            if self.done == first or due(config.faults.compare_every, self.done):
                self.optimizer.settle()
                compare_replicas(self.model, self.mesh, self.done)
            if self.val_data is not None and due(config.eval.every, self.done) and not (last or stopping):
                stopping = not self.validate()
            if config.checkpoint.every and (due(config.checkpoint.every, self.done) or last or stopping):
                self.save(must=last or stopping)
        self.checkpointer.wait()
        if not stopping and self.val_data is not None:
            stopping = not self.validate()
        metrics.say(f"wrote {metrics.written()} (step {self.done})")
        if stopping and self.done > (self.checkpointer.last or 0):
            metrics.warn(f"stopped without saving (checkpoint.every=0): {self.stop.loss()}")
            return UNSAVED
        return STOPPED if stopping else 0

    def report(self, result: StepResult, lr: float) -> None:
        """A line on the console and a record in the log."""
        config, done = self.config, self.done
        values = result.metrics() | {"lr": lr, "epoch": self.loader.epoch, "tokens": done * config.tokens_per_step}
        seconds = self.phases.read()
        slow, warning = slowest(gather(seconds, self.mesh.world), config.faults.slow_rank)
        self.metrics.warn(warning)
        values |= self.throughput.read(seconds) | expert_load(self.model, result.counts_LE) | self.resources.read(done) | slow
        with_tables = result.counts_LE is not None and detailed(done, self.train.steps, self.train.log_every)
        self.metrics.log(done, values, {"load": load_table(self.model, result.counts_LE)} if with_tables else None)
        self.metrics.say(console_line(done, self.train.steps, values))
        self.metrics.warn(self.guard.dead(done, result.grad_norm))

    def report_first(self, result: StepResult, logged: bool) -> None:
        """After the first step since the start: whether the loss is that of an untrained model, and what memory holds."""
        if self.state is None and logged:
            self.metrics.warn(first_loss_problem(self.config, result.loss))
        self.metrics.say(f"held        {steady_state(self.optimizer, self.device)}")

    def report_health(self, health: Health) -> None:
        """This rank's numbers into the log; the worst of all ranks' decide about a warning, on which `auto` measures anew."""
        measured = health.result()
        self.metrics.log(self.done, health_by_class(measured), {"fp8": measured})
        warning = unhealthy(worst_of(gather(measured, self.mesh.world)), self.config.faults)
        self.metrics.warn(warning)
        if warning is not None:
            self.take_step.auto.measure_next()

    def validate(self) -> bool:
        """False when a signal has cut it short."""
        config, metrics, prompt = self.config, self.metrics, self.config.eval.prompt
        with self.phases("eval"):
            self.optimizer.settle()
            result = evaluate(
                self.model, self.val_data, self.mesh, self.device, micro_batch=self.train.micro_batch, samples=config.eval.samples,
                isolate=config.data.isolate_documents, stop=lambda: self.stop.agreed(self.mesh.world),
            )  # fmt: skip
            if result is None:
                return False
            metrics.log(self.done, result.metrics())
            metrics.say(f"validation  {result.nats:.4f} nats/token  {result.bits_per_byte:.4f} bits/byte")
            if prompt:
                text = generate(self.model, self.tokenizer, prompt, config.eval.sample_tokens, device=self.device)
                metrics.say(f"sample      {text!r}")
        return True

    def save(self, must: bool) -> None:
        """A checkpoint, in the background unless it `must` be there before the run goes on."""
        with self.phases("checkpoint"):
            wait = must or not self.config.checkpoint.background
            self.checkpointer.try_save(
                step=self.done, consumed=self.loader.consumed, wandb_id=self.wandb_id, history=tuple(self.guard.history), wait=wait,
                must=must, warn=self.metrics.warn,
            )  # fmt: skip


def due(every: int, step: int) -> bool:
    """Whether something done every `every` steps (0: never) is done at `step`."""
    return every > 0 and step % every == 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return command_line(run, __doc__, arguments)


if __name__ == "__main__":
    leave(exit_status(main))
