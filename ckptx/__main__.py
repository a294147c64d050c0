"""`python -m ckptx`, and so `torchrun -m ckptx`."""

from ckptx.cli.main import main

if __name__ == "__main__":
    main()
