from fedprompt.cli import main

main()
