"""Entry point of `python -m ckptx` and `torchrun -m -- ckptx`."""

from ckptx.cli.main import run

if __name__ == "__main__":
    run()
