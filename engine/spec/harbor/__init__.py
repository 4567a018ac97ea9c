"""Task folders of Harbor's form as a task source: `tasks: {source: harbor, path: FOLDER}`."""
