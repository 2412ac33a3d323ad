"""Trains a model, from the configuration to the last checkpoint. The whole run stands here, top to bottom.

    python train.py --config configs/tiny.yaml                                       one process
    torchrun --nproc-per-node 8 train.py --config configs/small.yaml optim.lr=3e-4   one process a GPU
    python train.py --config configs/ling_mini.yaml --dry-run                        check, count and stop

Exit status: 0 done; 2 a mistake in the configuration or in its files, or no memory for the experts' rows; 3 loss or gradient not
finite, or a spike; 4 replicas differ; 5 another rank is gone or hangs; 6 stopped without saving; 143 stopped by a signal, after
saving (docs/reliability.md).
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported: idle OpenMP threads sleep instead of spinning

import torch

from fp8.health import Health
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
from training.data import Loader, PackedDataset
from training.errors import STOPPED
from training.evaluate import evaluate
from training.faults import Guard, slowest, unhealthy
from training.metrics import Metrics, Phases, Throughput, console_line, expert_load, health_by_class, load_table
from training.packing import packed_path
from training.process import admit, choose_device, gather, make_deterministic
from training.profile import ProfileWindow
from training.recovery import recover
from training.replicas import compare_replicas
from training.resources import Resources, detailed, steady_state
from training.sample import generate
from training.schedule import fitted, learning_rate
from training.start import first_loss_problem, set_gradient_format, set_starting_values
from training.states import gradient_format, optimizer_states
from training.step import TrainStep
from training.stopping import StopRequest
from training.tokenizer import check_vocab, load_tokenizer
from training.watchdog import Watchdog, record_collectives


def run(config: Config) -> int:
    """The run on this rank; returns the exit status."""
    with ExitStack() as stack:
        return run_in(stack, config)


def run_in(stack: ExitStack, config: Config) -> int:
    """`run`; what has to end with it, however it ends, is on the stack."""
    # ---------------------------------------------------------------- ranks, data, model
    train, data, optim, parallel, faults = config.train, config.data, config.optim, config.parallel, config.faults
    stop = stack.enter_context(closing(StopRequest(faults.stop_within_s)))
    device, dtype = choose_device(train, config.fp8.recipe)
    record_collectives(config.run.dir)
    mesh = build_mesh(
        parallel.tp, parallel.ep, device, parallel.sequence_parallel, train.timeout_s,
        tp_wire=WIRES[parallel.tp_wire], combine_wire=WIRES[parallel.combine_wire], timed=True, dispatch=parallel.dispatch,
    )  # fmt: skip
    metrics = stack.enter_context(closing(Metrics(config, active=mesh.world.rank == 0)))
    metrics.prefix = admit(config, device)
    watchdog = stack.enter_context(closing(Watchdog(mesh.world.rank, faults.quiet_s)))
    tokenizer = load_tokenizer(data.tokenizer)
    check_vocab(tokenizer, config.model.vocab_size)
    splits = (packed_path(data.dir, split) for split in ("train", "validation"))
    train_data, val_data = (PackedDataset(path, data.seq_len, tokenizer.fingerprint) for path in splits)

    torch.manual_seed(train.seed + mesh.world.rank)
    with torch.device(device):
        model = Transformer(config.model, config.fp8.build(), mesh, dtype, config.fp8.activations)
    set_gradient_format(model, gradient_format(optim, config.fp8.level))
    states = optimizer_states(optim, config.fp8.level)
    betas = optim.beta1, optim.beta2
    attach_auto_scale(model, mesh, parallel.grad_wire, parallel.simulated_ranks)
    adamw = *betas, optim.eps, optim.weight_decay, states, train.seed, optim.offload
    optimizer = make_optimizer(model, mesh, parallel.zero, parallel.zero_partition, parallel.overlap_gather, *adamw)
    identity = tokenizer.fingerprint, train_data.fingerprint
    checkpointer = stack.enter_context(closing(Checkpointer(config, model, optimizer, mesh, *identity)))
    state = checkpointer.restore(metrics.warn)
    if state is None:
        set_starting_values(config, model, optimizer, mesh, *identity, metrics.warn)
    elif (nothing_left := finished(config, state, mesh.world, metrics.warn)) is not None:
        metrics.say(nothing_left)
        return 0
    done, consumed, wandb_id = (state.step, state.consumed, state.wandb_id) if state else (0, 0, None)
    loader = Loader(
        train_data, global_batch=train.global_batch, micro_batch=train.micro_batch, seed=train.seed, consumed=consumed,
        rank=mesh.dp.rank, num_ranks=mesh.dp.size, isolate_documents=data.isolate_documents,
    )  # fmt: skip

    # ---------------------------------------------------------------- logs
    phases, guard = Phases(device), Guard(faults, state.history if state else ())
    flops = flops_per_token(config.model, data.seq_len)
    throughput = Throughput(config.tokens_per_step, flops, mesh.world.size, device)
    options = config.model.bias_update_rate, phases, config.fp8.auto, train.cuda_graphs, parallel.grad_wire
    wires = parallel.grad_rounding, parallel.zero, parallel.simulated_ranks
    take_step = TrainStep(model, optimizer, mesh, optim, *options, guard, *wires, config.model.bias_warmup_steps)
    resources = Resources(model, optimizer, mesh, done)
    window = ProfileWindow(config.profile, config.run.dir, mesh.world.rank, device)
    phases.note = lambda name: watchdog.note(f"{name} of step {done}")
    stop.loss = lambda: f"the newest checkpoint is of step {checkpointer.last}; {done - (checkpointer.last or 0)} steps are lost"
    wandb_id = metrics.start(done, wandb_id)
    metrics.say(f"{config.run.dir}: {mesh.world.size} x {device}, recipe {config.fp8.recipe}, steps {done}-{train.steps}")
    metrics.say(throughput.formula())
    if train.deterministic:
        metrics.say(make_deterministic(device))
    if (shrunk := fitted(optim, train.steps)) != (optim.warmup_steps, optim.decay_steps if optim.schedule == "wsd" else 0):
        metrics.warn(f"train.steps={train.steps} has no room for optim.warmup_steps and decay_steps: they are {shrunk} in this run")

    def validate() -> bool:
        """False when a signal has cut it short."""
        with phases("eval"):
            optimizer.settle()
            sizes = train.micro_batch, config.eval.samples, data.isolate_documents
            result = evaluate(model, val_data, mesh, device, *sizes, stop=lambda: stop.agreed(mesh.world))
            if result is None:
                return False
            metrics.log(done, result.metrics())
            metrics.say(f"validation  {result.nats:.4f} nats/token  {result.bits_per_byte:.4f} bits/byte")
            if config.eval.prompt:
                text = generate(model, tokenizer, config.eval.prompt, config.eval.sample_tokens, device=device)
                metrics.say(f"sample      {text!r}")
        return True

    # ---------------------------------------------------------------- the loop
    first, stopping = done + 1, stop.agreed(mesh.world)
    while done < train.steps and not stopping:
        done += 1
        last, logged = done == train.steps, done % train.log_every == 0 or done in (first, train.steps)
        health = Health() if due(config.fp8.health_every, done) else None
        for _, weight in weights(model):
            weight.health = health
        window.begin(done)
        with phases("data"):
            batches = [batch.to(device) for batch in next(loader)]
        lr = learning_rate(done - 1, optim, train.steps)
        result = take_step(done, batches, lr, stop.requested, want_counts=logged)
        stopping = result.interrupted and stop.arm()
        if result.problem is not None:
            if (back := recover(result.problem, done, guard, checkpointer, metrics)) is not None:
                done = back
                continue
            logged, health = False, None
        for note in result.notes:
            metrics.say(note)
        throughput.step()
        metrics.advance()
        for path in window.end(done, last or stopping):
            metrics.say(f"wrote {path}")
        if state is None and done == first and logged:
            metrics.warn(first_loss_problem(config, result.loss))
        if health is not None:
            measured = health.result()
            metrics.log(done, health_by_class(measured), {"fp8": measured})
            metrics.warn(unhealthy(measured, faults))
        if logged:
            values = result.metrics() | {"lr": lr, "epoch": loader.epoch, "tokens": done * config.tokens_per_step}
            seconds = phases.read()
            slow, warning = slowest(gather(seconds, mesh.world), faults.slow_rank)
            metrics.warn(warning)
            values |= throughput.read(seconds) | expert_load(model, result.counts_LE) | resources.read(done) | slow
            with_tables = result.counts_LE is not None and detailed(done, train.steps, train.log_every)
            metrics.log(done, values, {"load": load_table(model, result.counts_LE)} if with_tables else None)
            metrics.say(console_line(done, train.steps, values))
        if done == first:
            metrics.say(f"held        {steady_state(optimizer, device)}")
            metrics.say(f"peak        {resources.peak(device)}")
        if done == first or due(faults.compare_every, done):
            optimizer.settle()
            compare_replicas(model, mesh, done)
        if config.eval.samples and due(config.eval.every, done) and not (last or stopping):
            stopping = not validate()
        if config.checkpoint.every and (due(config.checkpoint.every, done) or last or stopping):
            with phases("checkpoint"):
                wait = last or stopping or not config.checkpoint.background
                now = done, loader.consumed, wandb_id, tuple(guard.history), wait
                checkpointer.try_save(*now, must=last or stopping, warn=metrics.warn)
    checkpointer.wait()
    if not stopping and config.eval.samples:
        stopping = not validate()
    metrics.say(f"wrote {metrics.path.parent}/: config.yaml, metrics.jsonl, checkpoints/, wandb/ (step {done})")
    return STOPPED if stopping else 0


def due(every: int, step: int) -> bool:
    """Whether something done every `every` steps (0: never) is done at `step`."""
    return every > 0 and step % every == 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return command_line(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
