"""`vllm-dflash parity`: is text with drafts the target's own? See command.py."""
