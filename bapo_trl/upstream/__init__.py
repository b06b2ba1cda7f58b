"""What lies in TRL, transformers and torch: names that change between versions, and workarounds."""
