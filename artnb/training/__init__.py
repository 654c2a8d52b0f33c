"""rows → packs → loss → step. `rows` and `pack` need no GPU; `loss` holds pure functions of tensors."""
