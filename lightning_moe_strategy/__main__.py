"""``lightning-moe``, the same program as ``python -m lightning_moe_strategy``. Help needs no torch."""

import sys

HELP = """\
usage: lightning-moe COMMAND [options]

Train mixture-of-experts models with FSDP x CP x EP on Lightning.

commands:
  fit          train              lightning-moe fit --config configs/tiny_cpu.yaml
  validate     evaluate on the validation data
  test         evaluate on the test data
  predict      run the model on the prediction data
  doctor       would training work on this machine, with what, and what to do where not
  demo         train a small mixture of experts on four CPU processes; run again, it resumes
  plan         memory, traffic and time of a run:    lightning-moe plan --model glm-5.2 --gpus 256 --context 1M
  simulate     the same from the code that runs:     lightning-moe simulate --config configs/tiny_cpu.yaml
  verify       is my model exact under a layout:     lightning-moe verify --config configs/tiny_cpu.yaml
  report       one HTML page of a run that was logged: lightning-moe report runs/tiny_cpu
  import       weights of Hugging Face in:           lightning-moe import --hf DIR --out start.ckpt
  export       and out:                              lightning-moe export --ckpt last.ckpt --out DIR
  inspect      what a checkpoint holds, and whether it is whole
  consolidate  one file of a checkpoint directory:   lightning-moe consolidate --ckpt last.ckpt --out whole.ckpt

options:
  --help     this page; 'lightning-moe fit --help' lists every option of a command
  --version  the version

Configurations are LightningCLI files: trainer, model and data, each given by class_path and init_args.
"""

TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
COMMANDS = (
    *TRAINER_COMMANDS, "doctor", "demo", "plan", "simulate", "verify", "report", "import", "export", "inspect",
    "consolidate",
)  # fmt: skip


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("lightning-moe-strategy"))
        return 0
    if arguments[0] in TRAINER_COMMANDS:
        from lightning_moe_strategy.cli.training import run

        run(arguments)
        return 0
    if arguments[0] == "doctor":
        from lightning_moe_strategy.cli.doctor import run_doctor

        return run_doctor(arguments[1:])
    if arguments[0] == "demo":
        from lightning_moe_strategy.cli.demo import run_demo

        run_demo(arguments[1:])
        return 0
    if arguments[0] == "plan":
        from lightning_moe_strategy.cli.plan import run_plan

        return run_plan(arguments[1:])
    if arguments[0] == "simulate":
        from lightning_moe_strategy.cli.simulate import run_simulate

        return run_simulate(arguments[1:])
    if arguments[0] == "verify":
        from lightning_moe_strategy.cli.verify import run_verify

        return run_verify(arguments[1:])
    if arguments[0] == "report":
        from lightning_moe_strategy.cli.report import run_report

        return run_report(arguments[1:])
    if arguments[0] in ("import", "export"):
        from lightning_moe_strategy.cli.weights import run_export, run_import

        return (run_import if arguments[0] == "import" else run_export)(arguments[1:])
    if arguments[0] in ("inspect", "consolidate"):
        from lightning_moe_strategy.cli.checkpoints import run_consolidate, run_inspect

        return (run_inspect if arguments[0] == "inspect" else run_consolidate)(arguments[1:])
    print(f"lightning-moe: command({arguments[0]!r}) must be one of {', '.join(COMMANDS)}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
