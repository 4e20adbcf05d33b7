# Install rules: see later.
