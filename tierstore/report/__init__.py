"""`tierstore report`: one page of HTML about a run, from the file that its policy's `record` names."""
