"""Capability gates: what a deployment needs to be right, checked before anything is started.

Each gate looks at the same `Facts` and either passes or names every refusal with its mend.  They
run in order (model, topology, transport, execution mode, accuracy, addresses), and all of them, so
that one run shows all that is wrong.  Where all pass, the planner's prediction follows: it refuses
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from shutil import which

from sglang_afd import accuracy_gate, model_gate, transport_gate
from sglang_afd.addresses import is_local, is_port, parse_address, port_problem, resolve_problem
from sglang_afd.cad import gate as cad_gate
from sglang_afd.command_line import int_value, last_value, values
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.facts import Facts, Refusal
from sglang_afd.families import MoeFacts, UnsupportedModel
from sglang_afd.features import refused
from sglang_afd.flags import NSYS, NSYS_PROGRAM
from sglang_afd.placement import PlacementError, read
from sglang_afd.plan.advice import advise
from sglang_afd.platform.defaults import environment_problem
from sglang_afd.spec import gate as spec_gate
from sglang_afd.topology import Mode, Role, TopologyError
from sglang_afd.upstream.ports import Port, first_command_ports, one_command_ports

MOST_CPU_RANKS = 64
_ONE_LANE_ONLY = (
    ("--disable-overlap-schedule", "a lane's next step is launched before its last one is read"),
    ("--enable-mixed-chunk", "prefills have a lane of their own, where nothing is decoded"),
)


@dataclass(frozen=True)
class Finding:
    """A gate's answer: that it passed and what, or one thing that is wrong and its mend.

    A gate that passed with a mend warns.
    """

    gate: str
    passed: bool
    message: str
    mend: str = ""


@dataclass(frozen=True)
class Gate:
    """A gate: what it refuses, and what it says when it refuses nothing."""

    name: str
    refusals: Callable[[Facts], Iterator[Refusal]]
    summary: Callable[[Facts], str]
    advice: Callable[[Facts], str] = lambda facts: ""
    """What the gate, although it passes, warns to do; empty: nothing."""


def findings(facts: Facts) -> list[Finding]:
    """What every gate finds, in order; a gate that refuses has a finding for each reason."""
    found: list[Finding] = []
    for gate in GATES:
        try:
            refusals = list(gate.refusals(facts))
        except (ConfigError, UnsupportedModel) as error:
            refusals = [Refusal.of(error)]
        except Exception as error:  # whatever a gate did not foresee is a refusal too, no traceback
            refusals = [unforeseen(gate.name, error)]
        found += [Finding(gate.name, False, *refusal) for refusal in refusals]
        if not refusals:
            found.append(Finding(gate.name, True, gate.summary(facts), gate.advice(facts)))
    predicted = advise(facts) if all(finding.passed for finding in found) else None
    if predicted is not None:
        found.append(Finding("performance", True, *predicted))
    return found


def unforeseen(gate: str, error: Exception) -> Refusal:
    """The refusal of a gate that could not look at what it was given."""
    return Refusal(
        f"the {gate} gate could not check this deployment: {type(error).__name__}: {error}",
        "correct config.json or the flag that it comes from; if all is right, report it",
    )


def _model(facts: Facts) -> Iterator[Refusal]:
    yield from model_gate.refusals(facts)
    if facts.config.mode is Mode.CAD and facts.moe is not None:
        yield from cad_gate.model(facts)


def _topology(facts: Facts) -> Iterator[Refusal]:
    yield from _devices(facts)
    moe, topology = facts.moe, facts.config.topology
    if moe is None:
        return
    if facts.config.mode is Mode.CAD:
        yield from cad_gate.topology(facts)
        return
    try:
        facts.config.emulation.whole.experts_per_rank(
            moe.num_experts + facts.config.expert_replicas
        )
    except TopologyError as error:
        flag = "--afd-emulate-ffn-ranks" if facts.config.emulated_ffn_ranks else "--afd-ffn-ranks"
        yield Refusal.of(TopologyError(str(error).replace("--afd-ffn-ranks", flag)))
    yield from _placement(facts.config, moe)
    tp, text = topology.attention_tp, facts.checkpoint.text_config
    heads = text.num_attention_heads
    kv_heads = text.num_key_value_heads
    if heads % tp:
        yield Refusal(
            f"{heads} attention heads do not divide over --afd-attention-tp {tp}",
            f"choose a divisor of {heads}",
        )
    if kv_heads % tp and tp % kv_heads:
        yield Refusal(
            f"{kv_heads} key-value heads neither divide over nor into --afd-attention-tp {tp}",
            f"choose a divisor or a multiple of {kv_heads}",
        )


def _placement(config: AfdConfig, moe: MoeFacts) -> Iterator[Refusal]:
    """Experts with several slots, or in other places than in order."""
    most = moe.num_experts * (len(config.emulation.whole.ffn_world) - 1)
    if config.expert_replicas > most:
        yield Refusal(
            f"--afd-expert-replicas {config.expert_replicas} is more than {most}: each of "
            f"{moe.num_experts} experts once more on every other FFN rank",
            "lower it",
        )
    elif config.expert_placement:
        experts, replicas = moe.num_experts, config.expert_replicas
        try:
            read(config.expert_placement, moe.layers, experts, replicas, None)
        except PlacementError as error:
            yield Refusal.of(error)


def _devices(facts: Facts) -> Iterator[Refusal]:
    device = last_value(facts.args, "--device")
    if device not in (None, "cpu", "cuda"):
        yield Refusal(f"AFD does not run on --device {device}", "use cuda or cpu")
    elif facts.on_cpu:
        yield from _cpu(facts)
    elif facts.machine.other_accelerator:
        yield Refusal("AFD runs on CUDA devices and on CPUs", "pass --device cpu")
    else:
        ranks = len(facts.config.local_ranks())
        first = int_value(facts.args, "--base-gpu-id", default=0)
        step = int_value(facts.args, "--gpu-id-step", default=1)
        needed, present = first + step * (ranks - 1) + 1, len(facts.machine.gpus)
        if needed > present:
            yield Refusal(
                f"{ranks} ranks start here, one GPU each, up to GPU {needed - 1}, but this machine "
                f"has {present}",
                "lower --afd-attention-ranks, --afd-ffn-ranks or --afd-attention-tp, start the "
                "roles on two machines (--afd-role), or pass --device cpu",
            )


def _cpu(facts: Facts) -> Iterator[Refusal]:
    ranks = len(facts.config.local_ranks())
    if ranks > MOST_CPU_RANKS:
        yield Refusal(
            f"{ranks} ranks would start on this machine's CPU, each a process with the memory of "
            f"one; the most are {MOST_CPU_RANKS}",
            "lower --afd-attention-ranks, --afd-ffn-ranks or --afd-attention-tp",
        )
    problem = environment_problem(facts.environment, ranks)
    if problem:
        yield Refusal.of(ConfigError(problem))


def _topology_summary(facts: Facts) -> str:
    topology, moe = facts.config.topology, facts.moe
    if facts.config.mode is Mode.CAD:
        return cad_gate.topology_summary(facts)
    text = (
        f"{topology.attention_ranks} attention and {topology.ffn_ranks} FFN DP ranks of "
        f"{topology.attention_tp}, {len(facts.config.local_ranks())} of "
        f"{topology.world_size} ranks here on the {'CPU' if facts.on_cpu else 'GPUs'}"
    )
    emulation = facts.config.emulation
    if emulation.active:
        whole = emulation.whole
        text += (
            f", measured as {whole.attention_ranks} attention and {whole.ffn_ranks} FFN DP ranks: "
            f"answers are NOT the model's"
        )
    if moe is None:
        return text + "; experts not checked, the model gate refused"
    slots = moe.num_experts + facts.config.expert_replicas
    per_rank = emulation.whole.experts_per_rank(slots)
    return text + f"; {per_rank} experts of a layer on each FFN rank"


def _execution(facts: Facts) -> Iterator[Refusal]:
    for feature, by in refused(facts.args, facts.environment):
        yield Refusal(
            f"{by} asks for {feature.name}, which AFD refuses: {feature.reason}", feature.mend
        )
    if facts.nsys and which(NSYS_PROGRAM, path=facts.environment.get("PATH")) is None:
        yield Refusal(
            f"{NSYS} needs Nsight Systems, whose program {NSYS_PROGRAM} is not on the PATH",
            f"install the package nsight-systems-cli, or leave {NSYS} out: POST /afd/trace and "
            f"/start_profile need nothing",
        )
    if facts.config.lanes > 1:
        for flag, reason in _ONE_LANE_ONLY:
            if values(facts.args, flag):
                yield Refusal(
                    f"{flag} does not go with --afd-lanes {facts.config.lanes}: {reason}",
                    "leave one of the two out",
                )
    yield from spec_gate.execution_refusals(facts)
    if facts.config.mode is Mode.CAD:
        yield from cad_gate.execution(facts)


def _execution_summary(facts: Facts) -> str:
    return "every feature asked for is served"


def _addresses(facts: Facts) -> Iterator[Refusal]:
    host = last_value(facts.args, "--host") or "127.0.0.1"
    http_port = int_value(facts.args, "--port", default=30000)
    if not is_port(http_port):
        yield Refusal(f"--port {http_port} is no port", "choose one of 1 to 65535")
        return
    if problem := resolve_problem(host):
        yield Refusal(f"--host: {problem}", "give an address of this machine")
    elif not is_local(host):
        yield Refusal(f"--host: {host} is no address of this machine", "give one, or 0.0.0.0")
    elif problem := port_problem(host, http_port):
        yield Refusal(f"HTTP server: {problem}", "stop that process, or choose another --port")
    rendezvous = last_value(facts.args, "--dist-init-addr", "--nccl-init-addr")
    if rendezvous is None:
        yield from _taken(one_command_ports(http_port), "choose another --port")
        return
    try:
        address = parse_address(rendezvous)
    except ValueError as error:
        yield Refusal(f"--dist-init-addr: {error}", "give the attention command's HOST:PORT")
        return
    if problem := resolve_problem(address.host):
        yield Refusal(f"--dist-init-addr: {problem}", "give the attention command's HOST:PORT")
        return
    ports = first_command_ports(address.host, address.port)
    if is_local(address.host) and http_port in {port.port for port in ports}:
        yield Refusal(
            f"--port {http_port} is one of the ports that follow from --dist-init-addr "
            f"{rendezvous}",
            "choose another --port",
        )
    if facts.config.command_role is not Role.FFN:
        if not is_local(address.host):
            yield Refusal(
                f"--dist-init-addr: {address.host} is no address of this machine, where the "
                f"attention command's ranks meet the others",
                "give an address of this machine that the FFN command can reach",
            )
            return
        yield from _taken(ports, "choose another port in --dist-init-addr")


def _taken(ports: list[Port], mend: str) -> Iterator[Refusal]:
    for host, port, use in ports:
        if not is_port(port):
            yield Refusal(f"{use} would need port {port}, which is none", mend)
            return
        if problem := port_problem(host, port):
            yield Refusal(f"{use}: {problem}", f"stop that process, or {mend}")
            return


def _addresses_summary(facts: Facts) -> str:
    port = int_value(facts.args, "--port", default=30000)
    return f"port {port} and the ports for the ranks are free"


GATES: tuple[Gate, ...] = (
    Gate("model", _model, model_gate.summary),
    Gate("topology", _topology, _topology_summary),
    Gate("transport", transport_gate.refusals, transport_gate.summary),
    Gate("execution mode", _execution, _execution_summary),
    Gate("accuracy", accuracy_gate.refusals, accuracy_gate.summary, accuracy_gate.advice),
    Gate("addresses", _addresses, _addresses_summary),
)
