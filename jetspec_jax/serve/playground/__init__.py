"""The playground: a web page that shows a model's output and each round's tree live."""
