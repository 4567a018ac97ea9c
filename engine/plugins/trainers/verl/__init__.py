"""verl's V1 trainer on episodes of a spec: the engine runs the episodes and gives the advantages, verl updates the
weights.

    export VERL_USE_EXTERNAL_MODULES=engine.plugins.trainers.verl.trainer
    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=engine +engine.spec=spec.yaml +engine.folder=runs/with-verl
    \\
        +actor_rollout_ref.rollout.agent.agent_loop_manager_class=engine.plugins.trainers.verl.manager.EngineManager …

Parts: `backend.py` samples with verl's servers, `rows.py` makes rows of TransferQueue, `manager.py` runs the episodes
and writes verl's data file, `trainer.py` is the registered trainer, which reads the advantages, `settings.py` refuses
settings of verl. `agent_loop.py` is another way in: one episode for verl's own manager, with one reward. verl is
imported by `trainer.py` alone, and by functions when they are called.
"""
