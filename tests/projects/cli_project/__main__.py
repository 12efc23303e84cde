"""``python -m tests.projects.cli_project fit --config config.yaml``: all that the project has in Python."""

from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(save_config_kwargs={"overwrite": True})
