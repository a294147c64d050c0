"""`python -m ckptx`, and so `torchrun -m ckptx`."""

from ckptx.cli.main import run

if __name__ == "__main__":
    run()
