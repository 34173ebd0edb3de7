"""The command `torchbagua`: one module a subcommand, each with `main(arguments) -> exit status`."""
