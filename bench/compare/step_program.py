"""What programs that run.py compares with bench_step have in common: options, turns, figures."""
import argparse
import json
import resource
import statistics


def option_parser(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=["gpt2", "bert", "llama", "lstm", "vit", "cnn"],
                        default="gpt2")
    for name, value in (("layers", 6), ("width", 384), ("heads", 6), ("context", 256),
                        ("batch-size", 8), ("vocab", 256), ("threads", 2), ("warmup", 3),
                        ("steps", 10)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--serve", action="store_true",
                        help="after the warm-up, read lines from stdin: each number N runs N steps and "
                        "prints their times; used by run.py to alternate between programs")
    return parser


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def peak_resident_bytes():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("VmHWM is missing from /proc/self/status")


def measure(options, timed_steps, program, instruction_set, start_up_bytes):
    """Warms up, then takes turns or --steps; returns what is to be printed.

    timed_steps(N): milliseconds of N steps by the clock and of all threads (what a busy machine
    leaves comparable, with one thread), and the last loss. program: what it says of itself."""
    timed_steps(options.warmup)
    result = {**program, "vocab": options.vocab, "dtype": options.dtype, "threads": options.threads,
              "device": options.device}
    times, cpu_times, loss = [], [], float("nan")

    def turn(count):
        nonlocal loss
        part, cpu_part, loss = timed_steps(count)
        times.extend(part)
        cpu_times.extend(cpu_part)
        return part

    if options.serve:
        print(json.dumps({**result, "ready": True, "instruction_set": instruction_set}), flush=True)
        try:
            while True:
                print(json.dumps({"ms": turn(int(input()))}), flush=True)
        except EOFError:
            pass
    else:
        turn(options.steps)
    ms = statistics.median(times) if times else float("nan")
    return {
        **result,
        "ms_per_step": round(ms, 3),
        "cpu_ms_per_step": round(statistics.median(cpu_times), 3) if cpu_times else None,
        "tokens_per_s": round(options.batch_size * options.context / ms * 1e3, 1),
        "resident_bytes": resident_bytes() - start_up_bytes,
        "peak_resident_bytes": peak_resident_bytes() - start_up_bytes,
        "peak_tensor_bytes": None,
        "loss": loss,
    }
