//! Experts whose weights are in host memory. The experts that tokens are routed to are copied to the device,
//! where a few can stay.
//!
//! The host has to know the routing, so it is read back in every block. Such a step cannot be captured.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{Error, Result, device_state::DeviceState, model::ExpertTraffic, read_back};
use kiln_kernels::Kernels;

use super::{Biases, ExpertsConfig, Names};
use crate::{
    HostRows, Weights,
    nn::{
        linear::Linear,
        mlp::{Between, Mlp, MlpConfig},
    },
};

/// Number of bytes of weights to copy to the device before waiting for the copies. Prompts are routed to
/// nearly all experts, so they are copied in several such batches.
pub(crate) const COPIED_AT_ONCE: usize = 64 << 20;

#[derive(Debug)]
pub(super) struct HostExperts {
    experts: Vec<HostMlp>,
    /// Biases of the experts, on the device.
    biases: Option<Biases>,
    between: Between,
    /// Number of experts that stay on the device.
    resident: usize,
    /// Experts on the device, from the least to the most recently used.
    held: Mutex<Vec<(usize, Mlp)>>,
    used: AtomicU64,
    copied: AtomicU64,
    copied_bytes: AtomicU64,
}

/// The weights of an expert.
#[derive(Debug)]
struct HostMlp {
    /// Gate and up projections, stacked: `[2 · intermediate, hidden]`.
    gate_up_proj: HostRows,
    /// Down projection `[hidden, intermediate]`.
    down_proj: HostRows,
}

impl HostMlp {
    fn bytes(&self) -> usize {
        self.gate_up_proj.bytes() + self.down_proj.bytes()
    }
}

/// The (token, slot) pairs that are routed to an expert. A pair is numbered `token · slots + slot`.
#[derive(Debug)]
struct Visit {
    expert: usize,
    pairs: Vec<usize>,
}

impl HostExperts {
    pub(super) fn load(
        weights: &mut dyn Weights,
        of_all: Vec<Names>,
        resident: usize,
        config: &ExpertsConfig,
        mlp: &MlpConfig,
    ) -> Result<Self> {
        let widths = config.widths(mlp.hidden);
        let [_, intermediate, hidden] = widths;
        if cfg!(target_family = "wasm") {
            let why = "needs reads that the host waits for, and a browser cannot wait; leave it out";
            return Err(Error::Setting { name: "offload_experts", why: why.to_owned() });
        }
        let biases = match config.bias {
            true => Some(Biases::load(weights, &of_all, widths)?),
            false => None,
        };
        let mut load = |names: Names| {
            Ok(HostMlp {
                gate_up_proj: weights.host_rows(&names.inputs(), hidden)?,
                down_proj: weights.host_rows(&[names.down], intermediate)?,
            })
        };
        Ok(Self {
            experts: of_all.into_iter().map(&mut load).collect::<Result<_>>()?,
            biases,
            between: config.between(mlp),
            resident,
            held: Mutex::default(),
            used: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.experts.iter().map(HostMlp::bytes).sum()
    }

    pub(super) fn traffic(&self) -> ExpertTraffic {
        ExpertTraffic {
            used: self.used.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
            bytes: self.copied_bytes.load(Ordering::Relaxed),
        }
    }

    /// Applies the chosen experts to each token.
    ///
    /// # Shapes
    /// `x`: `[batch, tokens, 1 or chosen, hidden]`; `experts`: `[batch, tokens, chosen]`; the result:
    /// `[batch, tokens, chosen, hidden]`.
    pub(super) fn forward(
        &self,
        x: Tensor<4>,
        experts: Tensor<3, Int>,
        kernels: &Kernels,
    ) -> Result<Tensor<4>> {
        let ([batch, tokens, each, hidden], [.., chosen]) = (x.dims(), experts.dims());
        let device = x.device();
        let routing = read_back::read(experts)?;
        let (here, away) = self.visits(routing.iter::<i64>());
        let visits: Vec<&Visit> = here.iter().map(|(visit, _)| visit).chain(&away).collect();

        // The vectors of each expert's tokens, made contiguous.
        let order: Vec<usize> = visits.iter().flat_map(|visit| visit.pairs.iter().copied()).collect();
        let vectors = x.reshape([1, batch * tokens * each, hidden]);
        let vectors = match batch * tokens * each {
            1 => vectors.expand([1, chosen, hidden]),
            _ => vectors.select(1, numbers(order.iter().map(|pair| pair * each / chosen), &device)),
        };
        let mut products = Vec::with_capacity(visits.len());
        let mut start = 0;
        let mut multiply = |visit: &Visit, mlp: &Mlp| {
            products.push(mlp.forward(None, vectors.clone().narrow(1, start, visit.pairs.len()), kernels));
            start += visit.pairs.len();
        };
        here.iter().for_each(|(visit, mlp)| multiply(visit, mlp));
        let mut away = &away[..];
        while !away.is_empty() {
            let (now, later) = away.split_at(self.fitting(away));
            for (visit, mlp) in now.iter().zip(self.copy(now, &device)?) {
                multiply(visit, &mlp);
                self.keep(visit.expert, mlp);
            }
            away = later;
        }
        let products = Tensor::cat(products, 1);
        let shape = [batch, tokens, chosen, hidden];
        if order.iter().copied().eq(0..order.len()) {
            return Ok(products.reshape(shape));
        }
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &pair)| places[pair] = place);
        Ok(products.select(1, numbers(places.into_iter(), &device)).reshape(shape))
    }

    /// Groups the pairs by expert, given the expert of each pair in order. Returns the visits to experts on
    /// the device, and the visits to other experts.
    fn visits(&self, experts: impl Iterator<Item = i64>) -> (Vec<(Visit, Mlp)>, Vec<Visit>) {
        let mut pairs = vec![Vec::new(); self.experts.len()];
        for (pair, expert) in experts.enumerate() {
            // The kernel returns only valid expert numbers.
            pairs[(expert as usize).min(self.experts.len() - 1)].push(pair);
        }
        let visits = pairs.into_iter().enumerate().map(|(expert, pairs)| Visit { expert, pairs });
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut here, mut away) = (Vec::new(), Vec::new());
        for visit in visits.filter(|visit| !visit.pairs.is_empty()) {
            match held.iter().position(|(expert, _)| *expert == visit.expert) {
                Some(place) => {
                    let (expert, mlp) = held.remove(place);
                    held.push((expert, mlp.clone()));
                    here.push((visit, mlp));
                }
                None => away.push(visit),
            }
        }
        self.used.fetch_add((here.len() + away.len()) as u64, Ordering::Relaxed);
        (here, away)
    }

    /// Returns how many of `visits` can be copied together: at least one.
    fn fitting(&self, visits: &[Visit]) -> usize {
        let ends = visits.iter().scan(0, |bytes, visit| {
            *bytes += self.experts[visit.expert].bytes();
            Some(*bytes)
        });
        ends.take_while(|end| *end <= COPIED_AT_ONCE).count().max(1)
    }

    /// Copies the experts of `visits` to the device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](kiln_core::Error::OutOfMemory) if the device has no room for them.
    fn copy(&self, visits: &[Visit], device: &Device) -> Result<Vec<Mlp>> {
        let state = DeviceState::of(device);
        let refusals = state.refusals();
        let own = || visits.iter().map(|visit| visit.expert);
        let copies = state.uploading(|| {
            let copies = own().map(|expert| self.to_device(expert, device)).collect();
            // Refused allocations must not stay, and the host must not run ahead of the copies.
            state.sync().map(|()| copies)
        })?;
        refusals.none_since()?;
        self.copied.fetch_add(visits.len() as u64, Ordering::Relaxed);
        self.copied_bytes.fetch_add(
            own().map(|expert| self.experts[expert].bytes()).sum::<usize>() as u64,
            Ordering::Relaxed,
        );
        Ok(copies)
    }

    fn to_device(&self, expert: usize, device: &Device) -> Mlp {
        let HostMlp { gate_up_proj, down_proj } = &self.experts[expert];
        let bias = |of: fn(&Biases) -> &Tensor<2>| {
            let biases = of(self.biases.as_ref()?).clone();
            let width = biases.dims()[1];
            Some(biases.narrow(0, expert, 1).reshape([width]))
        };
        Mlp::new(
            Linear::new(gate_up_proj.to_device(device), bias(|biases| &biases.gate_up)),
            self.between,
            Linear::new(down_proj.to_device(device), bias(|biases| &biases.down)),
        )
    }

    /// Keeps an expert on the device, evicting the least recently used one.
    fn keep(&self, expert: usize, mlp: Mlp) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        // Another generation may have copied it concurrently.
        if self.resident == 0 || held.iter().any(|(other, _)| *other == expert) {
            return;
        }
        if held.len() >= self.resident {
            held.remove(0);
        }
        held.push((expert, mlp));
    }
}

fn numbers(values: impl Iterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i32> = values.map(|value| value as i32).collect();
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, burn::tensor::DType::I32))
}
