"""The playground: a page that shows what a model writes, and each round's tree while it grows."""
