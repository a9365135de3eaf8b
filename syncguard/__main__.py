"""`python -m syncguard` is the `syncguard` command."""

from syncguard.cli.main import main

main()
